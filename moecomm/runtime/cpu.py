"""The CPU: kernels in the emulator, peers through shared memory or in one simulation."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from pathlib import Path
from typing import Any

from moecomm import env
from moecomm.agreement import SETUP_S, together
from moecomm.arena import Arena
from moecomm.arrays import Device, Kind
from moecomm.errors import OutOfMemory
from moecomm.group import Group
from moecomm.kernels.args import STATUS_BYTES, ArgBlock, Status
from moecomm.kernels.emulated import EmulatedKernels
from moecomm.layout import Layout
from moecomm.runtime.base import POISON, as_stream
from moecomm.transport import open_memory


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
    synchronous = True

    def __init__(self, layout: Layout, group: Group, transport: str) -> None:
        self._layout = layout
        self._simulation = group.simulation
        # What one rank may fail in alone comes before what all do together.
        together(group, "load", self._load, max(layout.cfg.timeout_s, SETUP_S))
        self._memory = open_memory(transport, group)
        self._symmetric = self._memory.allocate(layout.symmetric.nbytes).address
        self._statuses = list((Status * 3).from_address(self._status.address))
        self._connect(group)
        self._register(group.rank)
        if env.flag("POISON"):
            self._poison()
        self.memory_bytes = layout.symmetric.nbytes + layout.local.nbytes + STATUS_BYTES

    @property
    def local(self) -> int:
        return self._local.address

    @property
    def symmetric(self) -> int:
        return self._symmetric

    @property
    def status_address(self) -> int:
        return self._status.address

    @property
    def owner(self) -> object:
        return self._local

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
        self._kernels.launch(stage, block.args, num_tokens, input_code)

    def statuses(self) -> list[Status]:
        return self._statuses

    def read_words(self, region: str) -> list[int]:
        where = self._layout.local[region]
        words = (ctypes.c_uint64 * (where.nbytes // 8)).from_address(self.local + where.offset)
        return list(words)

    def close(self) -> None:
        self._kernels.close()
        self._memory.close()

    def _load(self) -> bool:
        self._kernels = EmulatedKernels(self._layout, self._simulation)
        self._local = HostMemory(self._layout.local.nbytes)
        self._status = HostMemory(STATUS_BYTES)
        return True

    def _connect(self, group: Group) -> None:
        peers = (ctypes.c_uint64 * group.size).from_address(
            self.local + self._layout.local["peers"].offset
        )
        for rank in range(group.size):
            peers[rank] = self._memory.peer_pointer(rank) or 0

    def _register(self, rank: int) -> None:
        """Tell the simulation what its checks should watch."""
        if self._simulation is None:
            return
        for base, arena, kind in (
            (self.symmetric, self._layout.symmetric, "symmetric"),
            (self.local, self._layout.local, "local"),
        ):
            for region in arena:
                watched = kind if region.payload else "input"
                self._simulation.register(
                    rank, base + region.offset, region.nbytes, watched, region.name
                )

    def _poison(self) -> None:
        for base, arena in (
            (self.symmetric, self._layout.symmetric),
            (self.local, self._layout.local),
        ):
            _fill(base, arena)


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
