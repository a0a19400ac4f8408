"""Ranks that pretend not to reach each other, and movers that bring their bytes across."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import beside
from emulator_programs import program

import moecomm as mc
from moecomm import comm, runtime
from moecomm.emulator.faults import Faults
from moecomm.emulator.simulation import Simulation
from moecomm.kernels.args import ArgBlock, Args
from moecomm.kernels.stages import PULL, PUSH
from moecomm.remote import DOOR_WORDS, PLAN_WORDS, Remote
from moecomm.runtime import cpu

FLAGS = ("abort_out", "abort_in", "door", "plan", "arrived")
BULK = ("out_head", "in_head", "out_record", "in_record", "out_row", "in_row")


class World:
    """What ranks and movers of one simulation know of each other. ``nodes[rank]``: ranks of the
    same node reach each other. ``beside``: push and pull run as on a GPU, on streams of their own;
    ``"late"``: pull whenever it comes to it; ``"together"``: beside the stage that waits for it, as
    it does where a kernel starts before the one ahead has ended."""

    def __init__(self, remote: Remote, nodes: Sequence[int], beside: str = "") -> None:
        self.remote = remote
        self.beside = beside
        self.nodes = nodes
        self.stop = (ctypes.c_uint64 * 2)()
        self.running = len(nodes)
        self.runtimes: dict[int, RemoteRuntime] = {}
        self.memory: list[Any] = []
        self.asked: dict[tuple[int, int], tuple[str, Args] | None] = {}

    def is_remote(self, rank: int, peer: int) -> bool:
        return self.nodes[rank] != self.nodes[peer]


class RemoteRuntime(cpu.CpuRuntime):
    """Leaves out pointers to peers on other nodes."""

    world: World

    def _connect(self, group: mc.Group) -> None:
        super()._connect(group)
        layout, local = self._layout, self.local
        peers = (ctypes.c_uint64 * group.size).from_address(local + layout.local["peers"].offset)
        base = local + layout.local["remote_base"].offset
        bases = (ctypes.c_uint64 * group.size).from_address(base)
        for rank in range(group.size):
            bases[rank] = peers[rank]
            if self.world.is_remote(group.rank, rank):
                peers[rank] = 0
        self.world.runtimes[group.rank] = self
        if self.world.remote.mode == "proxied":  # its mover starts when all ranks are there
            group.simulation.store(group.rank).set(f"mover {group.rank}", b"go")
        self._store = group.simulation.store(group.rank)
        self._asked: dict[int, int] = {}  # slot → number of the last push
        self._count = 0
        # Movers look at the words of ranks that have closed; and so may what runs beside.
        self.world.memory.append([self._memory.buffer(region) for region in self._regions])
        self.world.memory.append([self.owner, self._image])

    def launch(self, stage: str, block: ArgBlock, *more: Any) -> None:
        if not self.world.beside:
            return super().launch(stage, block, *more)
        rank, slot = self._layout.rank, block.args.slot
        if stage in PULL:
            self._store.get(f"pushed {rank} {self._asked[slot]}", 1e6)
            if self.world.beside == "late":
                self._kernels.launch(PULL[stage], block.args, 0, 0)
        self._kernels.launch(stage, block.args, *more[:2])
        if stage in PUSH:
            args = Args.from_buffer_copy(block.args)
            args.beside = self._count = self._count + 1
            self._asked[slot] = self._count
            self.ask((stage, args))
        return None

    def ask(self, what: tuple[str, Args] | None) -> None:
        """Let the streams beside this rank's go on with it; ``None``: no more."""
        self._count += what is None
        self.world.asked[self._layout.rank, self._count] = what
        self._store.set(f"asked {self._layout.rank} {self._count}", b"go")


def served(mode: str, **sizes: int) -> Remote:
    """``mode``: that of ``Remote``, or ``"bounce"``: proxied, by a bounce."""
    bounce = mode == "bounce"
    return Remote(mode="proxied" if bounce else mode, bounce=bounce, **sizes)  # type: ignore


def pretend(monkeypatch: Any, world: World) -> None:
    """From now on, communicators on the CPU are those of ``world``."""

    class Runtime(RemoteRuntime):
        pass

    Runtime.world = world
    monkeypatch.setattr(cpu, "CpuRuntime", Runtime)
    monkeypatch.setattr(runtime, "choose_remote", lambda *_: world.remote)
    assert comm.runtime is runtime


def simulate_remote(
    world: World,
    fn: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    checks: Any = "strict",
    faults: Faults | None = None,
) -> list[Any]:
    """``fn(group, *args)`` on every rank; with ``proxied``, a mover beside each."""
    num_ranks = len(world.nodes)
    proxied = world.remote.mode == "proxied"
    world.stop[:] = 0, 0
    world.running = num_ranks
    world.runtimes.clear()
    world.asked.clear()
    threads = num_ranks * (1 + proxied + 2 * (world.beside != ""))
    simulation = Simulation(threads, seed=seed, checks=checks, faults=faults)

    def call(number: int) -> Any:
        if number >= 2 * num_ranks:
            stream = beside.push if number < 3 * num_ranks else beside.pull
            return stream(world, simulation, number)
        if number >= num_ranks:
            return move(world, simulation, number - num_ranks)
        store = simulation.store(number)
        try:
            with mc.Group(number, num_ranks, store, simulation=simulation) as group:
                return fn(group, *args)
        finally:
            if world.beside:
                world.runtimes[number].ask(None)
            world.running -= 1
            if world.running == 0:
                world.stop[0] = 1

    found = simulation.run(call)[:num_ranks]
    assert world.stop[1] == 0, f"epoch {world.stop[1]}: a door came when peers could have answered"
    return found


def move(world: World, simulation: Simulation, rank: int) -> None:
    num_ranks = len(world.nodes)
    for other in range(num_ranks):
        simulation.store(num_ranks + rank).get(f"mover {other}", 1e6)
    simulation.launch(
        num_ranks + rank, program("mover"), table(world), "mover", words(world, rank), num_ranks, 32
    )


def table(world: World) -> list[int]:
    areas = world.runtimes[0]._layout.areas
    assert areas is not None
    return [
        areas.num_ranks, areas.slots, areas.private_records, DOOR_WORDS, PLAN_WORDS,
        areas.channels, areas.head_bytes, areas.record_bytes, areas.row_bytes,
        areas.staged_records, areas.source_records, areas.staged_rows, areas.landing_rows,
        *(areas.flags[name].offset for name in FLAGS),
        *(areas.bulk[name].offset for name in BULK),
    ]  # fmt: skip


def words(world: World, rank: int) -> bytes:
    num_ranks = len(world.nodes)
    remote = sum(1 << peer for peer in range(num_ranks) if world.is_remote(rank, peer))
    runs = [world.runtimes[r] for r in range(num_ranks)]
    pad = [0] * (16 - num_ranks)
    flags, bulk = [r.remote_flags for r in runs], [r.network_bulk for r in runs]
    values = [rank, ctypes.addressof(world.stop), remote, *flags, *pad, *bulk, *pad]
    values.append(world.remote.bounce)
    return struct.pack(f"{len(values)}Q", *values)
