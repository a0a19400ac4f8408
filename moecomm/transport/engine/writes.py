"""Writes of every kind, as commands for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moecomm.errors import ConfigError
from moecomm.transport.base import (
    Operation,
    PeerGroup,
    Region,
    RemoteRegion,
    Write,
    check_imm,
    check_rank,
)
from moecomm.transport.engine import records as R
from moecomm.transport.engine.commands import Commands, Place, keys, pages, write_rows
from moecomm.transport.engine.operations import Queued
from moecomm.transport.engine.queue import OperationQueue
from moecomm.transport.engine.regions import Registered, resolve

_SHARD_BYTES = 64  # shards are multiples of this, but for the last


class Writes(OperationQueue):
    """One-sided writes, in turn over the NICs."""

    _next_nic = 0

    def peer_group(self, ranks: Sequence[int]) -> PeerGroup:
        """See ``Transfer.peer_group``."""
        self._check_usable()
        for rank in ranks:
            check_rank(rank, self.size)
        return PeerGroup(tuple(ranks))

    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
        *,
        shards: int = 1,
    ) -> Operation:
        """See ``Transfer.write``.

        Args:
            shards: cut the payload into so many parts, in turn over the NICs. ``imm`` comes once
                with each part, also where parts are empty: expect ``shards`` of them.
        """
        return self._write(Queued("write", 0, src.nbytes, sent), [Write(src, dst)], imm, shards)

    def scatter(
        self,
        group: PeerGroup,
        slices: Sequence[Write],
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
        *,
        shards: int = 1,
    ) -> Operation:
        """See ``Transfer.scatter``. Slices take the NICs in turn; ``shards`` as in ``write``."""
        ranks = tuple(s.dst.rank for s in slices)
        if ranks != group.ranks:
            raise ConfigError(f"slices: are for ranks {ranks}, must be for {group.ranks}")
        nbytes = sum(s.src.nbytes for s in slices)
        return self._write(Queued("scatter", 0, nbytes, sent), slices, imm, shards)

    def write_pages(
        self,
        src: Region,
        src_pages: npt.ArrayLike,
        dst: RemoteRegion,
        dst_pages: npt.ArrayLike,
        page_bytes: int,
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Operation:
        """Copy page ``src_pages[i]`` of ``src`` to page ``dst_pages[i]`` of ``dst``, for all i.

        Pages of ``page_bytes`` are numbered from the beginning of each region; they take the NICs
        in turn. ``imm`` comes once with every page.
        """
        self._check_write(imm, 1)
        check_rank(dst.rank, self.size)
        if isinstance(page_bytes, bool) or not isinstance(page_bytes, int) or page_bytes < 1:
            raise ConfigError(f"page_bytes={page_bytes!r}: must be an integer from 1")
        self._check_length(page_bytes)
        places, registered = resolve(dst, self.num_nics), self._regions.find(src)
        sources = pages("src_pages", src_pages, src.nbytes, page_bytes)
        targets = pages("dst_pages", dst_pages, dst.nbytes, page_bytes)
        if len(sources) != len(targets):
            raise ConfigError(f"dst_pages: {len(targets)} pages; src_pages has {len(sources)}")
        nics = (self._next_nic + np.arange(len(sources))) % self.num_nics
        self._next_nic += len(sources)
        rows = write_rows(len(sources), imm)
        rows["peer"], rows["nic"], rows["nbytes"] = dst.rank, nics, page_bytes
        rows["local"] = src.address + sources * page_bytes
        rows["local_key"] = keys(n.local_key for n in registered.nics)[nics]
        bases = np.array([base for base, _ in places], np.uint64)
        rows["remote"] = bases[nics] + (targets * page_bytes).astype(np.uint64)
        rows["remote_key"] = keys(key for _, key in places)[nics]
        commands = Commands(Queued("write", 0, page_bytes * len(rows), sent))
        commands.add_rows(rows)
        return self._queue(commands)

    def barrier(self, group: PeerGroup, imm: int) -> Operation:
        """See ``Transfer.barrier``. With a group of one rank: an immediate alone."""
        self._check_usable()
        check_imm(imm)
        commands = Commands(Queued("barrier", 0, 0))
        for rank in group.ranks:
            self._add(commands, rank, imm)
        return self._queue(commands)

    # ---- Inside ---------------------------------------------------------------------------------

    def _write(
        self, operation: Queued, writes: Sequence[Write], imm: int | None, shards: int
    ) -> Operation:
        self._check_write(imm, shards)
        commands = Commands(operation)
        for write in writes:
            check_rank(write.dst.rank, self.size)
            nbytes, registered, places = write.src.nbytes, None, None
            if nbytes or write.dst.key:
                places = resolve(write.dst, self.num_nics)
            if nbytes:
                registered = self._regions.find(write.src)
            part = nbytes
            if shards > 1:
                part = -(-nbytes // (shards * _SHARD_BYTES)) * _SHARD_BYTES
            self._check_length(part)
            for shard in range(shards):
                first = min(shard * part, nbytes)
                piece = write.src.part(first, min(part, nbytes - first))
                self._add(commands, write.dst.rank, imm, piece, registered, places, first)
        return self._queue(commands)

    def _add(
        self,
        commands: Commands,
        rank: int,
        imm: int | None,
        piece: Region | None = None,
        registered: Registered | None = None,
        places: tuple[tuple[int, int], ...] | None = None,
        first: int = 0,
    ) -> None:
        """Append one write. One of nothing names valid memory on both sides all the same: efa
        looks at it."""
        self._next_nic += 1
        nic = self._next_nic % self.num_nics
        local, remote, nbytes = self._control_source(nic), self._control_target(nic, rank), 0
        if piece is not None and registered is not None and places is not None and piece.nbytes:
            nbytes = piece.nbytes
            local = Place(piece.address, registered.nics[nic].local_key)
            remote = Place(places[nic][0] + first, places[nic][1])
        commands.add(R.WRITE, rank, nic, imm, local, nbytes, remote)

    def _check_write(self, imm: int | None, shards: int) -> None:
        self._check_usable()
        if imm is not None:
            check_imm(imm)
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= 1024:
            raise ConfigError(f"shards={shards!r}: must be an integer from 1 to 1024")

    def _check_length(self, nbytes: int) -> None:
        longest = self.max_write_bytes
        if nbytes > longest:
            raise ConfigError(
                f"src: one write of {nbytes} bytes; the NICs take at most {longest}, so use shards"
            )
