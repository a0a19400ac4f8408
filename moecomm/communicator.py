"""``Communicator``: what there is to a communicator besides its halves."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import Self

from moecomm import forks
from moecomm.config import MoeConfig
from moecomm.errors import PeerTimeout, StateError
from moecomm.group import Group
from moecomm.handle import State
from moecomm.kernels.args import ArgBlock, Status
from moecomm.layout import Layout
from moecomm.received import ReceivedViews
from moecomm.reports import failure_of, take_report
from moecomm.runtime.base import Runtime
from moecomm.slots import Slots
from moecomm.stats import Stats, read_stats

logger = logging.getLogger(__name__)


class Communicator:
    """The base of ``MoeComm``: who may call it, what its kernels reported, and its end.

    ``MoeComm`` makes the parts that are only declared here.
    """

    layout: Layout
    _runtime: Runtime
    _blocks: list[ArgBlock]
    _trouble: Status  # what broke the communicator, where kernels write it
    _views: ReceivedViews

    def __init__(self, cfg: MoeConfig, group: Group) -> None:
        self.config = cfg
        self.group = group
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._forked = False  # a copy in a child of the process that made it
        self._slots = Slots(cfg.in_flight)
        self._failure: PeerTimeout | None = None
        self._closed = False
        self.torch_exchanges: object = None  # ``moecomm.torch``'s, which live as long as this
        forks.tell(self)

    def expert_range(self, rank: int) -> range:
        """Global ids of the experts on ``rank``."""
        return self.layout.expert_range(rank)

    @property
    def memory_bytes(self) -> int:
        """Device memory this communicator holds on this rank."""
        return self._runtime.memory_bytes

    def check(self) -> None:
        """Raise what a kernel reported. Never blocks.

        Raises:
            PeerTimeout: from then on from every half, too: the group has lost a step.
            Overflow, ConfigError: once; the handle it concerns is closed.
        """
        with self._lock:
            self._check_failure()
            if not self._closed:
                self._check_handles()

    def stats(self) -> Stats:
        """Counters since construction; on a GPU this synchronises."""
        with self._lock:
            self._check_open("stats")
            return read_stats(self.layout, self._runtime)

    def close(self) -> None:
        """Let go of everything. Idempotent; not collective; peers that still wait time out.

        In a forked child it does nothing.
        """
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._slots.close()
            self._views.clear()
            self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def after_fork_in_child(self) -> None:
        """Another thread may have held the lock, and is not here to let go of it: the child's
        calls shall be refused, not wait."""
        self._lock = threading.RLock()
        self._forked = True

    # ---- for the halves ----------------------------------------------------------------------

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise StateError(f"{call}: this MoeComm is closed")
        if self._forked:
            raise StateError(
                f"{call}: this MoeComm belongs to process {self._pid}; a forked child must make "
                "its own group and MoeComm"
            )

    def _check_usable(self, call: str) -> None:
        # Each half comes through here: the common case takes no call, and asks the system nothing.
        # (What failed stays in `_trouble`, whose memory is there until `close`.)
        if self._closed or self._forked or self._trouble.code:
            self._check_open(call)
            self._check_failure()

    def _check_failure(self) -> None:
        """Raise what broke the communicator, now and from now on."""
        if self._failure is None and not self._closed and self._trouble.code:
            trouble, cause, me = self._trouble, self._runtime.failure(), self.group.rank
            own = cause is not None and cause.peer == me  # it is this rank's network that failed
            if own and me not in (trouble.rank, trouble.peer):
                cause = None  # others miss a third rank: this one's own slowness explains nothing
            # What waits here cannot see that it waits for its own rank's network.
            self._failure = failure_of(trouble, me if own and trouble.rank == me else None)
            self._failure.__cause__ = cause
            logger.error("rank %d: %s", self.group.rank, self._failure)
        if self._failure is not None:
            raise self._failure

    def _check_handles(self) -> None:
        """Raise, once, what concerns one handle; where launches are synchronous, close it.

        Halves of an asynchronous device do not look here: their peers count on this rank's
        part of the step, and the kernels of a step that overflowed do nothing but keep in step.
        """
        found = take_report(self.config, self._runtime.statuses())
        if found is None:
            return
        error, slot = found
        handle = self._slots.holder(slot)
        if handle is not None and self._runtime.synchronous:
            where = self._runtime.stream(None, handle.kind)
            self._runtime.launch("release", self._blocks[slot], 0, 0, where, None)
            self._slots.free(handle, State.FAILED)
        raise error
