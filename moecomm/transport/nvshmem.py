"""NVSHMEM: memory that GPUs of several machines reach, by stores within a node, else by puts.

Needs ``nvshmem4py`` and the NVSHMEM library, and one process a rank. Where every peer's heap is
mapped, kernels store to it as over NVLink. Where one is not, or ``MOECOMM_NVSHMEM_NO_POINTERS``
says so, kernels put with NVSHMEM (``moecomm.remote``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from moecomm import env
from moecomm.cuda_driver import call, current
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport import nvshmem_heap, nvshmem_library
from moecomm.transport.allocation import agree_on_size, find_region, refusal
from moecomm.transport.base import Region, check_rank, check_usable
from moecomm.transport.nvshmem_heap import Block, Heap

logger = logging.getLogger(__name__)


def finalize(group: Group, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Stop NVSHMEM in the processes of ``group``, which gives its heap back; the next communicator
    starts it anew, for any ranks. Collective; without it NVSHMEM runs until the process ends.

    Raises:
        StateError: NVSHMEM does not run for exactly these ranks, or one of them has a communicator
            open; on every rank.
        PeerTimeout: a rank did not come; unless that was before anything was stopped, this process
            cannot use NVSHMEM any more.
    """
    nvshmem_heap.finalize(group, timeout_s)


class NvshmemMemory:
    """``Memory`` in the symmetric heap. Constructing is collective.

    Args:
        group: the ranks; each a process.
        index: this rank's GPU.
        heap_bytes: what will be allocated, for the size of a heap that is not there yet.
        timeout_s: how long collective calls wait for the other ranks.

    Raises:
        TransportUnavailable: NVSHMEM is missing, or is in use for other ranks; on every rank.
        PeerTimeout: a rank did not come.
    """

    transport = "nvshmem"

    def __init__(
        self,
        group: Group,
        index: int,
        *,
        heap_bytes: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._pid = os.getpid()
        self._index = index
        self._timeout_s = timeout_s
        self._closed = False
        self._blocks: dict[Region, Block] = {}
        self._group = group.child()  # calls on the caller's group do not mix with ours
        self._heap: Heap = nvshmem_heap.start(self._group, index, heap_bytes, timeout_s)
        self.pointers_allowed = self._agree_on_pointers()

    @property
    def taken_bytes(self) -> int:
        """Memory of this rank's heap that its allocations hold, with what rounding adds."""
        return sum(block.nbytes for block in self._blocks.values())

    def allocate(self, nbytes: int) -> Region:
        """See ``Memory.allocate``.

        Raises:
            ConfigError: not a positive size, or not the same on all ranks; raised on all of them.
            StateError: NVSHMEM was finalised.
            OutOfMemory: the heap has no room, on any rank.
            PeerTimeout: a rank does not allocate.
        """
        check_usable(self._pid, self._closed)
        agree_on_size(self._exchange({"nbytes": repr(nbytes), "refused": refusal(nbytes)}))
        block = self._heap.allocate(self._group, nbytes, self._timeout_s)
        region = Region(block.address, nbytes)
        self._blocks[region] = block
        with current(self._index) as cu:
            call(cu.cuMemsetD8, block.address, 0, block.nbytes)
            call(cu.cuCtxSynchronize)
        self._group.barrier(self._timeout_s)  # nobody writes to what is not yet zero
        return region

    def peer_pointer(self, rank: int, region: Region | None = None) -> int | None:
        """See ``Memory.peer_pointer``; ``None`` also where pointers are not to be used."""
        if not self.pointers_allowed and rank != self._group.rank:
            return None
        return self.heap_pointer(rank, region)

    def heap_pointer(self, rank: int, region: Region | None = None) -> int | None:
        """Where NVSHMEM has mapped the copy of ``region`` that ``rank`` has, whoever may use it."""
        address = self._find(region).address
        check_rank(rank, self._group.size)
        return self._heap.library.pointer(address, rank) or None

    def everybody_reachable(self, region: Region) -> bool:
        """Whether every rank may store to every other. Collective."""
        ranks = range(self._group.size)
        mine = all(self.peer_pointer(rank, region) is not None for rank in ranks)
        return all(m["mine"] for m in self._exchange({"mine": mine}))

    def everybody_mapped(self, region: Region) -> bool:
        """Whether NVSHMEM's puts are stores between all ranks. Collective."""
        ranks = range(self._group.size)
        mine = all(self.heap_pointer(rank, region) is not None for rank in ranks)
        return all(m["mine"] for m in self._exchange({"mine": mine}))

    def module_init(self, module: Any) -> None:
        """Tell device code in a loaded CUmodule where the heap is."""
        with current(self._index):
            self._heap.library.module_init(module)

    def module_finalize(self, module: Any) -> None:
        """Before the module is unloaded."""
        with current(self._index):
            self._heap.library.module_finalize(module)

    def close(self) -> None:
        """See ``Memory.close``. The heap uses the memory again when all ranks have closed."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        while self._blocks:
            self._heap.give_back(self._blocks.popitem()[1])
        self._group.close()

    def __enter__(self) -> NvshmemMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agree_on_pointers(self) -> bool:
        """One rank that is told not to use pointers is enough: all have the same layout."""
        forbidden = env.flag("NVSHMEM_NO_POINTERS")
        return not any(m["forbidden"] for m in self._exchange({"forbidden": forbidden}))

    def _find(self, region: Region | None) -> Region:
        check_usable(self._pid, self._closed)
        return find_region(self._blocks, region)

    def _exchange(self, message: dict[str, Any]) -> Sequence[dict[str, Any]]:
        blobs = self._group.all_gather(json.dumps(message).encode(), self._timeout_s, "allocate")
        return [json.loads(blob) for blob in blobs]


def host_version() -> tuple[int, ...]:
    """What the host library says."""
    return nvshmem_library.load().version


def host_path() -> str:
    """Where the host library lies."""
    return nvshmem_library.load().path


def open_memory(group: Group, index: int, heap_bytes: int = 0) -> NvshmemMemory:
    """What ``moecomm.transport.open_gpu_memory("nvshmem", group, index)`` returns."""
    return NvshmemMemory(group, index, heap_bytes=heap_bytes)
