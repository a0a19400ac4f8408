"""The mover's program as plain Python, beside a model of kernels and of a network without order.

The program's sources run here uncompiled, on real memory, with stand-ins for the engine: so a test
may look at every write, let kernels run between any two of its loads, and change the sources.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import moecomm as mc
from moecomm.layout import Layout
from moecomm.remote import HALVES, Remote, RemoteAreas
from moecomm.remote_words import TICKET_BITS, Door, Kind, Move, Plan, RemoteWords, parse
from moecomm.transport.base import Region
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.commands import Place
from moecomm.transport.proxy import mover as mover_module
from moecomm.transport.proxy import state as P

FOLDER = Path(mover_module.__file__).parent
FILES = ("words", "landing", "arriving", "sending", "failing", "program")
CFG = mc.MoeConfig(num_experts=4, top_k=2, hidden=16, max_tokens=6, in_flight=2, wire="flags")
PRIVATE = 2
MOST_ROWS = 3
ROOM = 64


def load(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def store(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def stamp(kind: int, slot: int, source: int, dest: int, epoch: int) -> int:
    """What every word of a write says."""
    return ((kind * 64 + slot) * 16 + source) * 16 + dest << 32 | epoch


def sources(old: str = "", new: str = "") -> str:
    """All of the program in one text; ``old``, which is there once, replaced."""
    text = ""
    for name in FILES:
        text += (
            (FOLDER / f"{name}.py")
            .read_text(encoding="utf-8")
            .replace("from __future__ import annotations\n", "")
        )
    text = re.sub(
        r"^from moecomm\.transport\.(engine|proxy\.\w+)[.\w]* import (\([^)]*\)|.*)\n",
        "",
        text,
        flags=re.M,
    )
    if old:
        assert text.count(old) == 1, (old, text.count(old))
    return text.replace(old, new) if old else text


class Engine:
    """What a program sees of its engine, and the network that takes its writes."""

    num_nics = 2
    state = 1 << 20

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.program_operations = range(7, 200)
        self.pending: dict[int, int] = defaultdict(int)
        self.errors: dict[int, int] = {}
        self.inbox: deque[int] = deque()
        self.queued = 0
        self.broken: dict[int, int] = {}
        self.fault = 0
        self.now = 1

    # For Mover._fill.
    def local_place(self, region: Region, nic: int) -> Place:
        return Place(region.address, 100 + nic)

    def remote_place(self, dst: Any, nic: int) -> Place:
        return Place(dst.address, 200 + nic)

    def control_places(self, rank: int, nic: int) -> tuple[Place, Place]:
        return Place(11, 12), Place(13, 14)

    def functions(self) -> dict[str, Any]:
        """What the program calls."""
        world = self.world

        def load_acquire(address: int) -> int:
            world.anything()  # kernels run beside the mover
            return load(address)

        def publish(address: int, value: int) -> None:
            assert value > load(address) or value < 0, "a word that only grows"
            store(address, value)
            world.anything()

        def begin(engine: int, op: int, count: int) -> None:
            assert self.pending[op] == 0, "an operation that is not done"
            self.pending[op], self.errors[op] = count, 0

        def write(engine: int, op: int, *numbers: int) -> None:
            self.queued += 1
            assert self.queued <= ROOM, "no room"
            world.post(self.rank, op, *numbers)

        return {
            "inner": lambda f: f, "hook": lambda _: lambda f: f, "P": P,
            "ld64": load, "ld64_acquire": load_acquire, "st64": store, "st64_release": store,
            "publish": publish, "begin": begin, "write": write,
            "room": lambda engine: ROOM - self.queued,
            "is_done": lambda engine, op: self.pending[op] == 0,
            "error_of": lambda engine, op: self.errors.get(op, 0),
            "has_failed": lambda engine, peer: self.broken.get(peer, 0),
            "fault": lambda engine: self.fault,
            "next_arrival": lambda engine: self.inbox.popleft() if self.inbox else -1,
            "now_ns": lambda engine: self.now, "clock_ns": lambda engine: self.now,
        }  # fmt: skip


class Kernels:
    """One slot of one rank: what its kernels do, in their order, one small step at a time."""

    def __init__(self, world: World, rank: int, slot: int, first: int, last: int) -> None:
        self.world, self.rank, self.slot = world, rank, slot
        self.words = RemoteWords(world.areas, rank)
        self.epoch, self.last = first, last
        self.steps = self.run()
        self.done = False
        self.tickets = 0

    def step(self) -> None:
        if not self.done:
            self.done = next(self.steps, None) is None

    def word(self, index: int) -> int:
        return self.world.flags[self.rank].address + 8 * index

    def arrived(self, peer: int, channel: int) -> bool:
        return load(self.word(self.words.arrived(self.slot, peer, channel))) >= self.epoch

    def wait(self, peer: int, kind: Kind) -> Any:
        for channel in self.words.channels(kind):
            while not self.arrived(peer, channel):
                yield True
        came = (kind, self.slot, peer, self.rank, self.epoch)
        assert came in self.world.delivered, f"told too early: {came}"
        if kind < Kind.ACK:
            move = self.world.move(*came)
            found = list(self.world.bytes_at(self.rank, move.dst, move.nbytes))
            if kind is Kind.HEAD:
                del found[self.world.areas.head_words - 1]
            assert set(found) <= {stamp(*came)}, f"not there: {came}"

    def pack(self, kind: Kind, peer: int) -> None:
        """What is to go to a peer, every word of it saying so."""
        world, of = self.world, (kind, self.slot, self.rank, peer, self.epoch)
        move = world.move(*of)
        words = world.bytes_at(self.rank, move.src, move.nbytes)
        words[:] = [stamp(*of)] * len(words)
        if kind is Kind.HEAD:  # its last word counts the records
            count = world.records(self.slot, self.rank, peer, self.epoch)
            words[world.areas.head_words - 1] = self.epoch << 32 | count

    def ask(self, half: int) -> int:
        """A ticket, or none: 0, as of what is replayed."""
        if self.world.random.random() < 0.3:
            return 0
        self.tickets += 1
        store(
            self.word(self.words.ticket(self.slot, half)),
            self.tickets << TICKET_BITS | self.epoch & (1 << TICKET_BITS) - 1,
        )
        return self.tickets

    def landed(self, half: int, ticket: int) -> Any:
        """Whoever waits for a ticket is woken, and not before all of it is there."""
        while load(self.word(self.words.landed(self.slot, half))) < ticket:
            yield True
        if ticket == 0:
            return
        for peer in self.world.others(self.rank):
            count = self.world.records(self.slot, peer, self.rank, self.epoch)
            kinds = [Kind.HEAD] + [Kind.PRIVATE] * (count > 0) + [Kind.RECORDS] * (count > PRIVATE)
            for kind in [Kind.ROWS] if half else kinds:
                channel = self.words.channels(kind)[0]
                assert self.arrived(peer, channel), f"woken too early: {kind.name} of {peer}"

    def ring(self, door: Door) -> None:
        store(self.word(self.words.door(self.slot, door)), self.epoch)

    def plan(self, peer: int, **values: int) -> None:
        for name, value in values.items():
            store(self.word(self.words.plan(self.slot, peer, Plan[name])), value)

    def run(self) -> Any:
        while self.epoch <= self.last:
            yield from self.exchange()
            self.epoch += 1
        yield None

    def exchange(self) -> Any:
        world, others = self.world, self.world.others(self.rank)
        acked = self.words.channels(Kind.ACK)[0]
        for peer in others:
            while load(self.word(self.words.arrived(self.slot, peer, acked))) < self.epoch - 1:
                yield True
        first = 0
        for peer in others:
            count = world.records(self.slot, self.rank, peer, self.epoch)
            self.plan(peer, RECORD_FIRST=first, RECORD_COUNT=count)
            first += count
        for door in (Door.HEAD, Door.PRIVATE, Door.RECORDS):
            for peer in others:
                self.pack(Kind(door), peer)
            self.ring(door)
            yield True
        ticket = self.ask(0)
        ending = world.ending(self.slot, self.epoch)
        if ending != "overflow":
            yield from self.landed(0, ticket)
        for peer in others:
            yield from self.wait(peer, Kind.HEAD)
            count = world.records(self.slot, peer, self.rank, self.epoch)
            if ending == "overflow":
                continue
            if count > 0:
                yield from self.wait(peer, Kind.PRIVATE)
            if count > PRIVATE:
                yield from self.wait(peer, Kind.RECORDS)
        if ending != "rows":
            self.ring(Door.ACK)
            return
        for peer in others:
            rows = world.rows(self.slot, self.rank, peer, self.epoch)
            base = MOST_ROWS * self.rank
            self.plan(peer, ROW_FIRST=MOST_ROWS * peer, ROW_COUNT=rows, ROW_BASE=base)
            self.pack(Kind.ROWS, peer)
        self.ring(Door.ROWS)
        yield True
        yield from self.landed(1, self.ask(1))
        for peer in others:
            yield from self.wait(peer, Kind.ROWS)


class World:
    """Ranks, each on a node of its own, with kernels and movers, and the network between them.
    ``repeats``: the share of arrivals that come once more, later."""

    def __init__(
        self,
        num_ranks: int,
        seed: int,
        *,
        first: int = 1,
        program: str = "",
        repeats: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.num_ranks, self.first, self.repeats = seed, num_ranks, first, repeats
        layout = Layout(CFG, num_ranks, 0, Remote(mode="proxied", private_records=PRIVATE))
        assert layout.areas is not None
        self.areas: RemoteAreas = layout.areas
        self.flags = [Block(self.areas.flags.nbytes) for _ in range(num_ranks)]
        self.bulk = [Block(self.areas.bulk.nbytes) for _ in range(num_ranks)]
        self.flying: list[tuple[tuple[Any, ...], bool, bool]] = []
        self.delivered: set[tuple[int, ...]] = set()
        self.posted: list[tuple[int, ...]] = []
        self.kernels: list[Kernels] = []
        self.busy = False
        self.movers = [self._mover(rank) for rank in range(num_ranks)]
        self.engines = [m._engine for m in self.movers]
        self.turns = []
        for engine, mover in zip(self.engines, self.movers, strict=True):
            space = dict(engine.functions())
            exec(compile(program or sources(), "mover", "exec"), space)
            self.turns.append((space["MOVE"], mover._at("state")))

    def others(self, rank: int) -> list[int]:
        return [r for r in range(self.num_ranks) if r != rank]

    def _mover(self, rank: int) -> Any:
        mover: Any = mover_module.Mover.__new__(mover_module.Mover)
        mover._engine, mover._areas = Engine(self, rank), self.areas
        mover._words, mover.num_ranks = RemoteWords(self.areas, rank), self.num_ranks
        mover._remotes, mover._timeout_s = tuple(self.others(rank)), 4.0
        regions = [self._regions(r) for r in range(self.num_ranks)]
        mover._fill(*regions[rank], regions)
        first, words = self.first, mover._words
        for slot in range(self.areas.slots):
            at = mover._at("slots") + P.SLOT_BYTES * slot
            store(at + P.SLOT_EPOCH, first)
            for half in range(HALVES):
                store(at + P.SLOT_HALVES + P.HALF_BYTES * half + P.HALF_DONE, first - 1)
            for peer in self.others(rank):
                for channel in range(self.areas.channels):
                    word = words.arrived(slot, peer, channel)
                    store(self.flags[rank].address + 8 * word, first - 1)
        return mover

    def _regions(self, rank: int) -> tuple[Region, Region]:
        flags = Region(self.flags[rank].address, self.areas.flags.nbytes)
        return flags, Region(self.bulk[rank].address, self.areas.bulk.nbytes)

    def bytes_at(self, rank: int, offset: int, nbytes: int) -> Any:
        """Of ``bulk`` of a rank, as words."""
        return (ctypes.c_int64 * (nbytes // 8)).from_address(self.bulk[rank].address + offset)

    def move(self, kind: Kind, slot: int, rank: int, peer: int, epoch: int) -> Move:
        """What a write from ``rank`` carries, as ``remote_words`` says."""
        words = RemoteWords(self.areas, rank)
        count = self.records(slot, rank, peer, epoch)
        lower = [p for p in self.others(rank) if p < peer]
        first = sum(self.records(slot, rank, p, epoch) for p in lower)
        if kind is Kind.HEAD:
            return words.head(slot, peer)
        if kind is Kind.PRIVATE:
            return words.private(slot, first, count)
        if kind is Kind.RECORDS:
            return words.records(slot, first, count)
        rows = self.rows(slot, rank, peer, epoch)
        return words.rows(slot, MOST_ROWS * peer, rows, MOST_ROWS * rank)

    # What is exchanged: numbers from the seed, the same whoever asks.
    def _number(self, most: int, *of: int) -> int:
        return random.Random(f"{self.seed} {of}").randint(0, most)

    def records(self, slot: int, source: int, dest: int, epoch: int) -> int:
        most = self.areas.staged_records // self.num_ranks
        return self._number(min(most, 4), 1, slot, source, dest, epoch)

    def rows(self, slot: int, source: int, dest: int, epoch: int) -> int:
        return self._number(MOST_ROWS, 2, slot, source, dest, epoch)

    def ending(self, slot: int, epoch: int) -> str:
        return ("rows", "rows", "ack", "overflow")[self._number(3, 3, slot, epoch)]

    # The network.
    def post(self, rank: int, op: int, *numbers: int) -> None:
        nic, peer, local, local_key, nbytes, remote, remote_key, imm = numbers
        kind, slot, source, low = parse(imm)
        assert source == rank
        assert 0 <= nic < 2
        self.posted.append((kind, slot, rank, peer))
        if kind > Kind.ACK:
            self._fly(rank, op, peer, imm, -1, Move(0, 0, 0))
            return
        epoch = load(self.movers[rank]._at("slots") + P.SLOT_BYTES * slot + P.SLOT_EPOCH)
        assert low == epoch & 8191
        move = self._check(rank, peer, Kind(kind), slot, epoch, local, nbytes, remote)
        assert (local_key, remote_key) == ((100 + nic, 200 + nic) if nbytes else (12, 14))
        self._fly(rank, op, peer, imm, epoch, move)

    def _check(
        self, rank: int, peer: int, kind: Kind, slot: int, epoch: int,
        local: int, nbytes: int, remote: int,
    ) -> Move:  # fmt: skip
        """A write is what the positions of ``remote_words`` say, for what this epoch exchanges."""
        if kind is Kind.ACK:
            assert (nbytes, local, remote) == (0, 11, 13)
            return Move(0, 0, 0)
        count = self.records(slot, rank, peer, epoch)
        assert kind is not Kind.PRIVATE or count > 0
        assert kind is not Kind.RECORDS or count > PRIVATE
        move = self.move(kind, slot, rank, peer, epoch)
        assert nbytes == move.nbytes, (kind.name, nbytes, move)
        if nbytes:
            assert local == self.bulk[rank].address + move.src, kind.name
            assert remote == self.bulk[peer].address + move.dst, kind.name
        return move

    def deliver(self) -> None:
        """One event, any one: a write's completion here, or its arrival there; some are slow."""
        if not self.flying:
            return
        at = self.random.randrange(len(self.flying))
        write, arrives, slow = self.flying[at]
        if slow and self.random.random() < 0.97:
            return
        del self.flying[at]
        rank, op, peer, imm, epoch, move, moved = write
        if not moved:  # at the latest when either end is told
            data = list(self.bytes_at(rank, move.src, move.nbytes))
            self.bytes_at(peer, move.dst, move.nbytes)[:] = data
            moved.append(True)
        if not arrives:
            self.engines[rank].pending[op] -= 1
            self.engines[rank].queued -= 1
            return
        kind, slot, _, _ = parse(imm)
        if epoch >= 0:
            self.delivered.add((kind, slot, rank, peer, epoch))
        self.engines[peer].inbox.append(imm)
        if self.repeats and self.random.random() < self.repeats:
            self.flying.append((write, True, True))

    def _fly(self, rank: int, op: int, peer: int, imm: int, epoch: int, move: Move) -> None:
        write = (rank, op, peer, imm, epoch, move, [])
        self.flying.append((write, False, False))
        self.flying.append((write, True, self.random.random() < 0.1))

    def anything(self) -> None:
        """Between two loads of a mover: kernels, or the network."""
        if self.busy or self.random.random() < 0.5:
            return
        self.busy = True
        kernels = self.kernels
        if kernels and self.random.random() < 0.1:  # one is far ahead of its mover
            kernels = [self.random.choice(kernels)] * 5
        for _ in range(self.random.randrange(30) if kernels else 0):
            self.random.choice(kernels).step()
        self.busy = False

    def run(self, epochs: int) -> None:
        """All slots through so many epochs; AssertionError where something is wrong or stands."""
        last = self.first + epochs - 1
        self.kernels = [
            Kernels(self, rank, slot, self.first, last)
            for rank in range(self.num_ranks)
            for slot in range(self.areas.slots)
        ]
        for _ in range(6000 * epochs):
            if all(k.done for k in self.kernels) and not self.flying:
                return
            choice = self.random.random()
            if choice < 0.4:
                self.random.choice(self.kernels).step()
            elif choice < 0.7:
                self.deliver()
            else:
                self.turn(self.random.randrange(self.num_ranks))
        raise AssertionError("nothing goes on")

    def turn(self, rank: int) -> None:
        function, state = self.turns[rank]
        function(state)
