"""What movers take for a step's bytes, beside what the bytes need: the same ones to the same peers,
by C, in one write a peer. Kernels are left out: their doors are rung for them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from moecomm.bench import transfer_programs as programs
from moecomm.bench.transfer_exchange import Exchange
from moecomm.bench.transfer_problem import SLOT, Bytes, Problem
from moecomm.errors import TransportError
from moecomm.group import Group
from moecomm.remote import WORD
from moecomm.remote_words import Door, Kind
from moecomm.run import run
from moecomm.runtime.cpu import SHARED_CORES
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.efa import open_engine
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine import state as S
from moecomm.transport.engine.blocks import Block
from moecomm.transport.proxy.mover import Mover, engine_options

Record = dict[str, Any]
Span = tuple[int, int]  # of the monotonic clock, ns: begun, all here
HALVES: Final = {
    "dispatch": (Door.HEAD, Door.PRIVATE, Door.RECORDS),  # rung in this order, as they follow
    "combine": (Door.ROWS,),
}
_HEAD_START_NS: Final = 20_000_000  # until a moment that is agreed on: every rank has heard of it
_QUIET_S: Final = 0.002
# Idle polls of C before it gives up the processor. With 4 ranks on 2 processors dispatch over tcp
# took it 1.81 ms with 0, 1.85 with 50, as movers have it, and 2.63 with 2000.
_C_SPIN: Final = 0


def movers(
    fabric: str, num_ranks: int, tokens: int, repeats: int, timeout_s: float
) -> list[Record]:
    """A record for dispatch and one for combine: processes of this machine, each a node of its own.

    Raises:
        TransportError: bytes are wrong, or a side does not end.
    """
    problem = Problem(num_ranks, tokens, min(timeout_s, 30.0))
    told = run(one_rank, num_ranks, fabric, problem, repeats, timeout_s=timeout_s)
    return [_record(fabric, half, problem, told) for half in HALVES]


def one_rank(group: Group, fabric: str, problem: Problem, repeats: int) -> Record:
    """Spans of both sides and halves, by name; and what the mover counted in each repeat."""
    spans: dict[str, list[Span]] = {}
    moved: list[Record] = []
    with opened(group, fabric, problem) as rank:
        rank.step(rank.by_c)
        rank.bytes.check((Door.RECORDS, Door.ROWS))
        rank.bytes.poison()
        rank.step(rank.by_mover)
        rank.bytes.check()
        for _ in range(repeats):
            before = rank.mover.counters()
            for half in HALVES:
                sides = {"c": rank.by_c, "mover": rank.by_mover, "pair": rank.one_pair}
                for side, measure in sides.items():
                    spans.setdefault(f"{side} {half}", []).append(measure(half))
            moved.append(_difference(before, rank.mover.counters()))
        rank.bytes.poison()
        rank.step(rank.by_mover)
        rank.bytes.check()
    return {"spans": spans, "moved": moved}


@contextlib.contextmanager
def opened(group: Group, fabric: str, problem: Problem) -> Iterator[Rank]:
    """A rank with its mover, whose memory holds what it sends, and poison where it receives."""
    options = engine_options(problem.areas, group.size, problem.timeout_s, **SHARED_CORES)
    engine = open_engine(group, fabric, num_nics=1, options=options)
    flags, bulk = (engine.allocate(arena.nbytes) for arena in problem.areas.arenas)
    mine = Bytes(problem, group.rank, flags.address, bulk.address)
    mine.prepare()
    mine.poison()
    others = problem.others(group.rank)
    timeout_s = problem.timeout_s
    mover = Mover(engine, group, problem.areas, others, flags, bulk, timeout_s, timeout_s)
    try:
        yield Rank(group, engine, mover, mine, bulk)
        group.barrier(timeout_s)
    finally:
        mover.close()


class Rank:
    """One rank of the measurement. Methods that move bytes are collective."""

    def __init__(
        self, group: Group, engine: TransferEngine, mover: Mover, mine: Bytes, bulk: Region
    ) -> None:
        self.bytes = mine
        self.mover = mover
        self.group = group
        self._engine = engine
        self._timeout_s = mine.problem.timeout_s
        self._epoch = 0
        self._move = tuple(engine._memory.word(word) for word in (S.PROGRAM, S.PROGRAM_STATE))
        self._ring = Block(programs.RING_BYTES)
        engine.hold(self._ring)
        for at, value in zip((programs.MOVE, programs.MOVER), self._move, strict=True):
            self._set(at, value)
        self._set(programs.RING_ENGINE, engine.state)
        targets = engine.exchange(bulk)
        self._exchange = {half: self._by_c(bulk, targets, HALVES[half][-1]) for half in HALVES}
        self._pair = {half: self._one_pair(bulk, targets, HALVES[half][-1]) for half in HALVES}

    def step(self, side: Callable[[str], Span]) -> None:
        """Dispatch and combine by one of the three below."""
        for half in HALVES:
            side(half)

    def by_mover(self, half: str) -> Span:
        """Ring the doors of a half: when this rank did, and when all bytes for it were here."""
        self._epoch += half == "dispatch"
        words, doors = self.bytes.words, HALVES[half]
        self._engine.set_program(*self._move, takes_arrivals=True)
        for at in (programs.RING_AT, programs.RUNG, programs.HERE):
            self._set(at, 0)
        self._set(programs.EPOCH, self._epoch)
        self._set(programs.DOORS, self.bytes.flags + WORD * words.door(SLOT, doors[0]))
        self._set(programs.NUM_DOORS, len(doors))
        arrivals = [
            self.bytes.flags + WORD * words.arrived(SLOT, peer, words.channels(Kind[door.name])[0])
            for peer in self.bytes.problem.others(self.group.rank)
            for door in doors
            if self._comes(peer, door)
        ]
        self._set(programs.NUM_WORDS, len(arrivals))
        for n, address in enumerate(arrivals):
            self._set(programs.WORDS + WORD * n, address)
        self._engine.set_program(programs.RING, self._ring.address, takes_arrivals=True)
        self._set(programs.RING_AT, self._moment())
        self._wait_for(lambda: self._get(programs.HERE) != 0, "the mover's half")
        return self._get(programs.RUNG), self._get(programs.HERE)

    def by_c(self, half: str) -> Span:
        """The same records or rows, one write to each peer, by C in the place of the mover."""
        return self._run(self._exchange[half])

    def one_pair(self, half: str) -> Span:
        """What rank 0 has for rank 1 alone, by C."""
        return self._run(self._pair[half])

    def _run(self, exchange: Exchange) -> Span:
        self._be_quiet()
        exchange.reset()
        self._engine.set_program(*exchange.program, takes_arrivals=True)
        exchange.start(self._moment())
        self._wait_for(exchange.is_over, "the exchange by C")
        self._engine.set_program(*self._move, takes_arrivals=True)
        return exchange.span()

    def _by_c(self, bulk: Region, targets: list[RemoteRegion], door: Door) -> Exchange:
        others = self.bytes.problem.others(self.group.rank)
        moves = [(targets[peer], self.bytes.whole(door, peer)) for peer in others]
        return Exchange(self._engine, bulk, moves, len(others), _C_SPIN)

    def _one_pair(self, bulk: Region, targets: list[RemoteRegion], door: Door) -> Exchange:
        moves = []
        if self.group.rank == 0:
            moves = [(targets[1], self.bytes.whole(door, 1))]
        expected = int(self.group.rank == 1)
        return Exchange(self._engine, bulk, moves, expected, _C_SPIN)

    def _comes(self, peer: int, door: Door) -> bool:
        """Whether a door of ``peer`` 's makes a write to this rank."""
        count = self.bytes.problem.counts[peer, self.group.rank]
        least = {Door.PRIVATE: 0, Door.RECORDS: self.bytes.problem.areas.private_records}
        return bool(count > least.get(door, -1))

    def _moment(self) -> int:
        """When to begin: soon, once all ranks are here; the same on all."""
        self.group.barrier(self._timeout_s)
        soon = (time.monotonic_ns() + _HEAD_START_NS).to_bytes(8, "big")
        return int.from_bytes(self.group.all_gather(soon, self._timeout_s, "moment")[0], "big")

    def _be_quiet(self) -> None:
        """C reads the queue that the loops read: they have had nothing under way for a while, on
        any rank, and nobody sends what one would answer."""
        quiet, deadline = 0, time.monotonic() + self._timeout_s
        while quiet < 2:
            time.sleep(_QUIET_S)
            with self._engine._resources.worker.paused():
                mine = b"" if self._engine._memory.in_flight() else b"quiet"
            told = self.group.all_gather(mine, self._timeout_s, "quiet")
            quiet = quiet + 1 if all(told) else 0
            if time.monotonic() > deadline:
                raise TransportError("posts of a mover: not done in time", operation="bench")

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            failure = self.mover.failure()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                raise TransportError(
                    f"rank {self.group.rank}: {what}: not done in {self._timeout_s:g} s",
                    operation="bench",
                )
            time.sleep(0.005)  # seldom: this thread must not take the worker's processor

    def _set(self, offset: int, value: int) -> None:
        self._ring.words[offset // WORD] = value

    def _get(self, offset: int) -> int:
        return self._ring.words[offset // WORD]


def _difference(before: Record, after: Record) -> Record:
    """Of a mover's counters, ``(writes, bytes, ns)`` by kind."""
    return {kind: [b - a for a, b in zip(before[kind], after[kind], strict=True)] for kind in after}


def _record(fabric: str, half: str, problem: Problem, told: list[Record]) -> Record:
    """Of each repeat, from the first rank's beginning to the last one's end; medians of those.

    ``bytes`` and ``writes``: of all movers. ``door_ms``: from a door's first post to the completion
    of its last, of any rank. ``pair_gb_s``: one rank's bytes for another, while all else rests.
    """
    times = {
        side: [
            _took(spans)
            for spans in zip(*(t["spans"][f"{side} {half}"] for t in told), strict=True)
        ]
        for side in ("c", "mover", "pair")
    }
    middle = {side: statistics.median(values) for side, values in times.items()}
    kinds = [door.name.lower() for door in HALVES[half]]
    last = [t["moved"][-1] for t in told]
    door_ms = {
        kind: statistics.median(m[kind][2] for t in told for m in t["moved"]) / 1e6
        for kind in kinds
    }
    return {
        "kind": "bulk",
        "fabric": fabric,
        "what": f"bulk {half}",
        "unit": "ms",
        "ranks": problem.num_ranks,
        "tokens": problem.tokens,
        "writes": sum(moved[kind][0] for moved in last for kind in kinds),
        "bytes": sum(moved[kind][1] for moved in last for kind in kinds),
        "c": middle["c"],
        "mover": middle["mover"],
        "share": middle["c"] / middle["mover"],
        "c_best": min(times["c"]),
        "mover_best": min(times["mover"]),
        "pair_gb_s": problem.bytes_of(0, 1, HALVES[half][-1]) / middle["pair"] / 1e6,
        "door_ms": door_ms,
        "correct": True,
    }


def _took(spans: Sequence[Span]) -> float:
    return (max(end for _, end in spans) - min(begun for begun, _ in spans)) / 1e6
