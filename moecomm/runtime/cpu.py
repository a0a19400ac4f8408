"""The CPU: kernels in the emulator, peers through shared memory or in one simulation."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moecomm import env
from moecomm.agreement import SETUP_S, together
from moecomm.arena import Arena
from moecomm.arrays import Device, Kind
from moecomm.errors import OutOfMemory, TransportError
from moecomm.group import Group
from moecomm.kernels.args import STATUS_BYTES, ArgBlock, Status
from moecomm.kernels.emulated import EmulatedKernels
from moecomm.kernels.numba_jit.sources import Sources
from moecomm.kernels.stages import has_bounce, in_line
from moecomm.layout import Layout
from moecomm.runtime.base import POISON, as_stream
from moecomm.transport import NETWORKS, open_memory
from moecomm.transport.base import Memory
from moecomm.transport.hybrid import HybridMemory
from moecomm.transport.loopback_memory import LoopbackMemory
from moecomm.transport.nodes import find_nodes

if TYPE_CHECKING:
    from moecomm.emulator.simulation import RangeKind
    from moecomm.transport.proxy.mover import Mover

# The emulated kernels need the processors, too: a mover with nothing to do gives its own up.
SHARED_CORES: Final = {"spin_turns": 50, "yield_turns": 2000}


class HostMemory:
    """Zeroed, page-aligned memory of this process; pages exist once they are touched.

    Raises:
        OutOfMemory: so many bytes cannot be mapped.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        except (OSError, OverflowError) as error:
            raise OutOfMemory(nbytes, _free_bytes(), "this machine") from error
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)


class CpuRuntime:
    """One rank on the CPU."""

    device: Device = "cpu"
    owner: object
    synchronous = True

    def __init__(
        self, layout: Layout, group: Group, transport: str, sources: Sources | None = None
    ) -> None:
        self._layout = layout
        self._sources = sources
        self._simulation = group.simulation
        # What one rank may fail in alone comes before what all do together.
        together(group, "load", self._load, max(layout.cfg.timeout_s, SETUP_S))
        self._mover: Mover | None = None
        self._memory = self._open_memory(transport, group)
        self._allocate()
        self._statuses = list((Status * 3).from_address(self.status_address))
        self._connect(group)
        self._register(group.rank)
        if env.flag("POISON"):
            self._poison()
        if isinstance(self._memory, HybridMemory) and layout.areas is not None:
            self._start_mover(group, transport, self._memory)
        shared = sum(region.nbytes for region in self._regions)
        image = 0 if self._image is None else self._regions[-1].nbytes
        self.memory_bytes = shared + image + layout.local.nbytes + STATUS_BYTES

    def stream(self, given: Any, kind: Kind) -> int:
        """There are no streams here; what cannot be one is refused all the same."""
        if given is not None:
            as_stream(given)
        return 0

    def join(self, earlier: int, later: int) -> None:
        """Launches have finished when they return."""

    def launch(
        self,
        stage: str,
        block: ArgBlock,
        num_tokens: int,
        input_code: int,
        stream: int,
        stream_object: object = None,
    ) -> None:
        for name in in_line(self._layout, stage):
            code = input_code if name == stage else 0
            self._kernels.launch(name, block.args, num_tokens, code)

    def statuses(self) -> list[Status]:
        return self._statuses

    def read_words(self, region: str) -> list[int]:
        where = self._layout.local[region]
        words = (ctypes.c_uint64 * (where.nbytes // 8)).from_address(self.local + where.offset)
        return list(words)

    def failure(self) -> TransportError | None:
        return None if self._mover is None else self._mover.failure()

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()  # first: it reads and writes the memory
        self._kernels.close()
        self._memory.close()

    def _load(self) -> bool:
        self._kernels = self._make_kernels()
        workspace = HostMemory(self._layout.local.nbytes)
        self.local, self.owner = workspace.address, workspace
        self._status = HostMemory(STATUS_BYTES)
        self.status_address = self._status.address
        return True

    def _allocate(self) -> None:
        """What peers write to. Where they are remote, also what a mover works on; with NVSHMEM
        everything is one part of its heap."""
        sizes = [arena.nbytes for arena in self._shared_arenas()]
        one = self._layout.areas is not None and not self._layout.areas.proxied
        self._regions = [self._memory.allocate(n) for n in ([sum(sizes)] if one else sizes)]
        starts = [region.address for region in self._regions]
        if one:
            starts = [starts[0], starts[0] + sizes[0], starts[0] + sizes[0] + sizes[1]]
        self.symmetric, self.remote_flags, self.network_bulk = (*starts, 0, 0)[:3]
        self.remote_bulk = self.network_bulk
        self._image: HostMemory | None = None
        if has_bounce(self._layout):
            self._image = HostMemory(sizes[-1])
            self.remote_bulk = self._image.address

    def _shared_arenas(self) -> list[Arena]:
        areas = self._layout.areas
        return [self._layout.symmetric, *([areas.flags, areas.bulk] if areas else [])]

    def _make_kernels(self) -> EmulatedKernels:
        if self._sources is None:
            return EmulatedKernels(self._layout, self._simulation)
        from moecomm.kernels.numba_jit.emulated import EmulatedPythonKernels

        return EmulatedPythonKernels(self._layout, self._simulation, self._sources)

    def _open_memory(self, transport: str, group: Group) -> Memory:
        if transport not in NETWORKS:
            return open_memory(transport, group)
        timeout_s = max(self._layout.cfg.timeout_s, SETUP_S)
        return HybridMemory(group, find_nodes(group, timeout_s), LoopbackMemory, timeout_s)

    def _start_mover(
        self, group: Group, transport: str, memory: HybridMemory[LoopbackMemory]
    ) -> None:
        from moecomm.runtime.proxied import start_mover

        flags, bulk = self._regions[1:]
        try:
            self._mover = start_mover(
                self._layout, group, transport, memory.nodes, (flags, bulk), **SHARED_CORES
            )
        except BaseException:
            self._kernels.close()
            memory.close()
            raise
        self._mover.hold(memory.local.buffer(flags), memory.local.buffer(bulk))

    def _connect(self, group: Group) -> None:
        peers = (ctypes.c_uint64 * group.size).from_address(
            self.local + self._layout.local["peers"].offset
        )
        for rank in range(group.size):
            peers[rank] = self._memory.peer_pointer(rank, self._regions[0]) or 0

    def _register(self, rank: int) -> None:
        """Tell the simulation what its checks should watch."""
        if self._simulation is None:
            return
        for base, arena in self._arenas():
            kind: RangeKind = "local" if arena is self._layout.local else "symmetric"
            for region in arena:
                watched: RangeKind = kind if region.payload else "input"
                self._simulation.register(
                    rank, base + region.offset, region.nbytes, watched, region.name
                )

    def _poison(self) -> None:
        for base, arena in self._arenas():
            _fill(base, arena)

    def _arenas(self) -> list[tuple[int, Arena]]:
        """All memory, with its parts."""
        shared = [self.symmetric, self.remote_flags, self.network_bulk]
        arenas = self._shared_arenas()
        image = [] if self._image is None else [(self._image.address, arenas[-1])]
        return [(self.local, self._layout.local), *zip(shared, arenas, strict=False), *image]


def _fill(base: int, arena: Arena) -> None:
    for region in arena:
        if region.poison:
            ctypes.memset(base + region.offset, POISON, region.nbytes)


def _free_bytes() -> int:
    """What the machine has left, or what this process may still map, where that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        if limit != resource.RLIM_INFINITY:
            free = min(free, max(0, limit - mapped))
    return free
