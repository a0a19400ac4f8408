"""Loopback on GPUs: ranks that are threads of one process, whose addresses mean the same to all."""

from __future__ import annotations

import weakref
from typing import Final

from moecomm.addresses import process
from moecomm.errors import TransportUnavailable
from moecomm.group import Group
from moecomm.transport.gpu_memory import GpuMemory
from moecomm.transport.gpu_pages import GpuPages

# What ranks of this process let each other write to, by address.
_SHARED: Final[weakref.WeakValueDictionary[int, GpuPages]] = weakref.WeakValueDictionary()


class ThreadMemory(GpuMemory):
    """``Memory`` that ranks of one process share; each may be on a GPU of its own."""

    transport = "loopback"
    shareable = False

    def _get_pages(self, pages: dict[int, GpuPages]) -> None:
        mine = pages[self._group.rank]
        _SHARED[mine.address] = mine
        offer = {"process": process(), "address": mine.address, "index": self._index}
        told = self._exchange(offer)
        if len({m["process"] for m in told}) > 1:
            raise TransportUnavailable(
                "transport='loopback' on GPUs joins threads of one process; use 'nvlink' for "
                "several processes"
            )
        mine.allow(sorted({m["index"] for m in told}))
        for rank, message in enumerate(told):
            pages[rank] = _SHARED[message["address"]]

    def _let_go(self, pages: dict[int, GpuPages]) -> None:
        """A rank that closes lets go of its own part; the part lives on until the peers that may
        still write to it have closed too."""
        pages.clear()


def open_memory(group: Group, index: int) -> ThreadMemory:
    """What ``moecomm.transport.open_memory("loopback", group, ("cuda", index))`` returns."""
    return ThreadMemory(group, index)
