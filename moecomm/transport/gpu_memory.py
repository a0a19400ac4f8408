"""What transports whose ranks map each other's GPU memory have in common."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Self

from moecomm.errors import MoecommError, TransportError
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport import gpu_pages
from moecomm.transport.allocation import agree_on_size, find_region, refusal
from moecomm.transport.base import Region, check_rank, check_usable
from moecomm.transport.gpu_pages import GpuPages


class GpuMemory:
    """``Memory`` on GPUs; a subclass says how a rank comes to its peers' pages.

    Args:
        group: the ranks.
        index: this rank's GPU, as this process numbers them.
        timeout_s: how long collective calls wait for the other ranks.
    """

    transport: str
    shareable: bool  # whether pages go to other processes

    def __init__(self, group: Group, index: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._pid = os.getpid()
        self._index = index
        self._timeout_s = timeout_s
        self._closed = False
        self._pages: dict[Region, list[GpuPages]] = {}
        self._group = group.child()  # calls on the caller's group do not mix with ours

    @property
    def taken_bytes(self) -> int:
        """Memory of this rank's GPU that its allocations hold, with what rounding adds."""
        return sum(pages[self._group.rank].nbytes for pages in self._pages.values())

    def allocate(self, nbytes: int) -> Region:
        """See ``Memory.allocate``.

        Raises:
            ConfigError: not a positive size, or not the same on all ranks; raised on all of them.
            OutOfMemory: this rank's GPU has not so much left; the others raise the next.
            TransportError: a rank could not allocate, or could not map a peer's memory.
            PeerTimeout: a rank does not allocate; ``phase`` is ``"allocate"``.
        """
        self._check_usable()
        mine = self._make(nbytes)
        pages: dict[int, GpuPages] = {self._group.rank: mine}
        try:
            self._open_all(pages)
        except BaseException:
            self._let_go(pages)
            raise
        region = Region(mine.address, nbytes)
        self._pages[region] = [pages[rank] for rank in range(self._group.size)]
        return region

    def peer_pointer(self, rank: int, region: Region | None = None) -> int:
        """See ``Memory.peer_pointer``; here there always is one."""
        pages = self._pages[self._find(region)]
        check_rank(rank, len(pages))
        return pages[rank].address

    def close(self) -> None:
        """See ``Memory.close``. What peers have mapped stays theirs until they close."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        while self._pages:
            self._let_go(dict(enumerate(self._pages.popitem()[1])))
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for subclasses ------------------------------------------------------------------

    def _get_pages(self, pages: dict[int, GpuPages]) -> None:
        """Add the peers' pages to ``pages``, which has this rank's.

        Raises:
            MoecommError: this rank cannot; the others will be told.
        """
        raise NotImplementedError

    def _let_go(self, pages: dict[int, GpuPages]) -> None:
        """Pages are of no more use to this rank."""
        raise NotImplementedError

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's message. Collective."""
        mine = json.dumps(message).encode()
        return [
            json.loads(blob) for blob in self._group.all_gather(mine, self._timeout_s, "allocate")
        ]

    # ---- inside ----------------------------------------------------------------------------

    def _make(self, nbytes: int) -> GpuPages:
        """This rank's memory, once every rank has its own."""
        mine: GpuPages | None = None
        error: MoecommError | None = None
        refused = refusal(nbytes)
        if not refused:
            try:
                mine = gpu_pages.make(self._index, nbytes, shareable=self.shareable)
            except MoecommError as caught:
                error = caught
        try:
            message = {"nbytes": repr(nbytes), "refused": refused, "failed": _text(error)}
            told = self._exchange(message)
            agree_on_size(told)
            self._check_failed(told, error)
        except BaseException:
            if mine is not None:
                mine.close()
            raise
        assert mine is not None
        return mine

    def _open_all(self, pages: dict[int, GpuPages]) -> None:
        """Add the peers' pages, once every rank has mapped all of them."""
        error: MoecommError | None = None
        try:
            self._get_pages(pages)
        except MoecommError as caught:
            error = caught
        self._check_failed(self._exchange({"failed": _text(error)}), error)

    def _check_failed(self, told: list[dict[str, Any]], error: MoecommError | None) -> None:
        """Raise on every rank what went wrong on one; on that one, its own error."""
        if error is not None:
            raise error
        for rank, message in enumerate(told):
            if message["failed"]:
                raise TransportError(
                    f"rank {rank} could not allocate: {message['failed']}",
                    transport=self.transport,
                    peer=rank,
                    operation="allocate",
                )

    def _check_usable(self) -> None:
        check_usable(self._pid, self._closed)

    def _find(self, region: Region | None) -> Region:
        self._check_usable()
        return find_region(self._pages, region)


def _text(error: MoecommError | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def release_all(pages: dict[int, GpuPages]) -> None:
    """Unmap ``pages`` now."""
    with contextlib.ExitStack() as last_things:
        for part in pages.values():
            last_things.callback(part.close)
