"""Memory that the ranks of a node reach, on each of several nodes; a network joins the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from moecomm.agreement import together
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport import AUTO, open_gpu_memory
from moecomm.transport.base import Memory, Region
from moecomm.transport.nodes import Nodes

M = TypeVar("M", bound=Memory)


class HybridMemory(Generic[M]):
    """``Memory`` with pointers to the ranks of the own node only.

    Args:
        group: all ranks. Constructing is collective.
        nodes: where they are.
        open_memory: opens the memory of a node for the group of its ranks.
        timeout_s: for collective calls.

    Raises:
        Exception: what ``open_memory`` raises.
        TransportError: it raised on another rank.
    """

    def __init__(
        self,
        group: Group,
        nodes: Nodes,
        open_memory: Callable[[Group], M],
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.nodes = nodes
        self._timeout_s = timeout_s
        self._group = group.child()
        mates = group.subgroup(nodes.mates)
        assert mates is not None
        self._mates = mates
        self._opened: M | None = None
        try:
            together(self._group, "open", lambda: self._open(open_memory), timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def local(self) -> M:
        """The memory of this node."""
        assert self._opened is not None
        return self._opened

    def allocate(self, nbytes: int) -> Region:
        """See ``Memory.allocate``. An error on one node is one on all."""
        return together(
            self._group, "allocate", lambda: self.local.allocate(nbytes), self._timeout_s
        )

    def peer_pointer(self, rank: int, region: Region | None = None) -> int | None:
        """See ``Memory.peer_pointer``: ``None`` for ranks of other nodes."""
        if rank not in self.nodes.mates:
            return None
        return self.local.peer_pointer(self.nodes.mates.index(rank), region)

    def close(self) -> None:
        """See ``Memory.close``."""
        if self._opened is not None:
            self._opened.close()
        self._mates.close()
        self._group.close()

    def _open(self, open_memory: Callable[[Group], M]) -> bool:
        self._opened = open_memory(self._mates)
        return True


class HybridGpuMemory(HybridMemory[Any]):
    """The same on GPUs: NVLink inside a node, or one process's own memory.

    Args: as ``HybridMemory``; ``index``: this rank's GPU.
    """

    def __init__(
        self, group: Group, nodes: Nodes, index: int, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        super().__init__(group, nodes, lambda mates: open_gpu_memory(AUTO, mates, index), timeout_s)

    @property
    def taken_bytes(self) -> int:
        """See ``GpuMemory.taken_bytes``."""
        return int(self.local.taken_bytes)
