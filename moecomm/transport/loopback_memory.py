"""Symmetric memory between the processes of one machine, or the threads of a simulation."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
from typing import Any

from moecomm.errors import TransportUnavailable
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport.allocation import agree_on_size, find_region, refusal
from moecomm.transport.base import Region, check_rank, check_usable
from moecomm.transport.shared_memory import InProcess, Mapping, Memfd, TempFile, Way

logger = logging.getLogger(__name__)


class LoopbackMemory:
    """``Memory`` by sharing it: every peer's copy of a region is mapped here.

    Args:
        group: the ranks; all on one machine, or all in one simulation.
        timeout_s: how long ``allocate`` waits for the other ranks.
    """

    def __init__(self, group: Group, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._pid = os.getpid()
        self._group = group.child()  # calls on the caller's group do not mix with ours
        self._timeout_s = timeout_s
        self._mappings: dict[Region, list[Mapping]] = {}
        self._closed = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    def allocate(self, nbytes: int) -> Region:
        """See ``Memory.allocate``.

        Raises:
            ConfigError: not a positive size, or not the same on all ranks; raised on all of them.
            TransportUnavailable: the ranks have no way to share memory, or one of them has not
                enough; raised on all of them.
            PeerTimeout: a rank does not allocate; ``phase`` is ``"allocate"``.
        """
        self._check_usable()
        ways: list[type[Way]] = [Memfd, TempFile]
        if self._group.simulation is not None:
            ways = [InProcess]
        reasons = []
        for way in ways:
            mappings, reason = self._try(way(), nbytes)
            if mappings is not None:
                region = Region(mappings[self.rank].address, nbytes)
                self._mappings[region] = mappings
                return region
            reasons.append(f"{way.__name__}: {reason}")
            logger.debug("rank %d: cannot share memory by %s", self.rank, reasons[-1])
        raise TransportUnavailable(
            "transport='loopback': the ranks cannot share memory; they must be processes of one "
            f"machine and of one user ({'; '.join(reasons)})"
        )

    def peer_pointer(self, rank: int, region: Region | None = None) -> int:
        """See ``Memory.peer_pointer``; over loopback there always is one."""
        return self._peer_mapping(rank, region).address

    def buffer(self, region: Region | None = None, rank: int | None = None) -> memoryview:
        """The bytes of ``region`` on ``rank`` (``None``: here). The memory stays mapped while the
        buffer, or an array over it, lives: also after ``close``."""
        rank = self.rank if rank is None else rank
        return self._peer_mapping(rank, region).buffer()[: self._find(region).nbytes]

    def close(self) -> None:
        """See ``Memory.close``. Peers keep what they have mapped."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._mappings.clear()
        self._group.close()

    def __enter__(self) -> LoopbackMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        check_usable(self._pid, self._closed)

    def _find(self, region: Region | None) -> Region:
        self._check_usable()
        return find_region(self._mappings, region)

    def _peer_mapping(self, rank: int, region: Region | None) -> Mapping:
        mappings = self._mappings[self._find(region)]
        check_rank(rank, len(mappings))
        return mappings[rank]

    def _try(self, way: Way, nbytes: int) -> tuple[list[Mapping] | None, str]:
        """Allocate by ``way``; where some rank cannot open a peer's, everybody's reason."""
        with contextlib.ExitStack() as opened:
            opened.callback(way.everyone_has_opened)
            mine, message = self._make(way, nbytes)
            told = [json.loads(m) for m in self._exchange(message)]
            agree_on_size(told)
            if not all("offer" in m for m in told):
                return None, _first(told, "failed")
            mappings, failed = self._open(way, told, mine)
            # Also the barrier after which nobody needs the way to the memory any more.
            reports = [json.loads(m) for m in self._exchange({"failed": failed})]
        if any(m["failed"] for m in reports):
            return None, _first(reports, "failed")
        return mappings, ""

    def _make(self, way: Way, nbytes: int) -> tuple[Mapping | None, dict[str, Any]]:
        refused = refusal(nbytes)
        if refused:
            return None, {"refused": refused}
        try:
            mapping, offer = way.make(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, ValueError, OverflowError) as error:
            return None, {"nbytes": nbytes, "failed": f"{nbytes} bytes: {error}"}
        return mapping, {"nbytes": nbytes, "offer": offer}

    def _open(
        self, way: Way, told: list[dict[str, Any]], mine: Mapping | None
    ) -> tuple[list[Mapping], str]:
        assert mine is not None
        mappings = []
        for rank, message in enumerate(told):
            try:
                mappings.append(
                    mine if rank == self.rank else way.open(message["offer"], mine.nbytes)
                )
            except (OSError, KeyError, ValueError) as error:
                return [], f"rank {self.rank} cannot open the memory of rank {rank}: {error}"
        return mappings, ""

    def _exchange(self, message: dict[str, Any]) -> list[bytes]:
        return self._group.all_gather(json.dumps(message).encode(), self._timeout_s, "allocate")


def _first(messages: list[dict[str, Any]], key: str) -> str:
    return next(str(m[key]) for m in messages if m.get(key))
