"""What movers exchange while they are timed: as much as a real routing makes it, and bytes that say
whose they are."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.config import MoeConfig
from moecomm.errors import TransportError
from moecomm.layout import Layout
from moecomm.remote import WORD, Remote, RemoteAreas
from moecomm.remote_words import Door, Move, Plan, RemoteWords

HIDDEN: Final = 7168
EXPERTS: Final = 256
TOP_K: Final = 8
SLOT: Final = 0  # one handle at a time
_POISON: Final = 0x5A
_SEED: Final = 2026


@dataclass(frozen=True)
class Problem:
    """Ranks that are all remote to each other: fp8 dispatch with a scale per 128 columns, bf16
    combine, one row back per (token, rank); uniform routing, the same on all ranks.

    Args:
        num_ranks: R.
        tokens: of each rank.
        timeout_s: of waits.
    """

    num_ranks: int
    tokens: int
    timeout_s: float

    @cached_property
    def areas(self) -> RemoteAreas:
        cfg = MoeConfig(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=self.tokens,
            dispatch_dtype="float8_e4m3fn",
            scale_block=128,
            layout="rank",
            timeout_s=self.timeout_s,
        )
        layout = Layout(cfg, self.num_ranks, 0, Remote(mode="proxied"))
        assert layout.areas is not None
        return layout.areas

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """``[R, R]``: tokens of each rank that go to each rank."""
        numbers = np.random.default_rng(_SEED).random((self.num_ranks, self.tokens, EXPERTS))
        chosen = np.argsort(numbers)[..., :TOP_K]
        owner = np.concatenate(
            [np.full(len(part), rank) for rank, part in enumerate(self._experts())]
        )[chosen]
        goes = [(owner == rank).any(-1).sum(-1) for rank in range(self.num_ranks)]
        return np.stack(goes, 1)

    def content(self, door: Door, source: int, dest: int) -> NDArray[np.int64]:
        """A head's numbers; of records and rows words no two of which are equal, in all ranks'."""
        if door is Door.HEAD:
            head = np.zeros(self.areas.head_bytes // WORD, np.int64)
            head[[0, self.areas.head_words - 1]] = self.counts[source, dest]
            return head
        first = ((int(door) << 10 | source) << 10 | dest) << 32
        return first + np.arange(self.bytes_of(source, dest, door) // WORD, dtype=np.int64)

    def bytes_of(self, source: int, dest: int, door: Door) -> int:
        """Of all records, or all rows, from rank to rank."""
        if door is Door.ROWS:
            return int(self.counts[dest, source]) * self.areas.row_bytes
        return int(self.counts[source, dest]) * self.areas.record_bytes

    def others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.num_ranks) if peer != rank]

    def _experts(self) -> list[Any]:
        return np.array_split(np.arange(EXPERTS), self.num_ranks)


@dataclass(frozen=True)
class Bytes:
    """One rank's memory of a problem: what it sends, and what has come.

    Args:
        problem: see ``Problem``.
        rank: whose.
        flags, bulk: addresses of the areas.
    """

    problem: Problem
    rank: int
    flags: int
    bulk: int

    @cached_property
    def words(self) -> RemoteWords:
        return RemoteWords(self.problem.areas, self.rank)

    def prepare(self) -> None:
        """What kernels would have written before they ring: plan, heads, records, rows."""
        counts = self.problem.counts
        for peer in self.problem.others(self.rank):
            numbers = {
                Plan.RECORD_FIRST: self._before(counts[self.rank], peer),
                Plan.RECORD_COUNT: counts[self.rank, peer],
                Plan.ROW_FIRST: self._before(counts[:, self.rank], peer),
                Plan.ROW_COUNT: counts[peer, self.rank],
                Plan.ROW_BASE: counts[peer, : self.rank].sum(),
            }
            for field, value in numbers.items():
                self.word(self.words.plan(SLOT, peer, field)).value = int(value)
            for door in (Door.HEAD, Door.RECORDS, Door.ROWS):
                move = self.whole(door, peer)
                self.at(move.src, move.nbytes)[:] = self.problem.content(door, self.rank, peer)

    def whole(self, door: Door, peer: int) -> Move:
        """The head, all records, or all rows that ``peer`` gets: they lie together at both ends."""
        counts, words = self.problem.counts, self.words
        if door is Door.HEAD:
            return words.head(SLOT, peer)
        if door is Door.ROWS:
            first = self._before(counts[:, self.rank], peer)
            base = int(counts[peer, : self.rank].sum())
            return words.rows(SLOT, first, int(counts[peer, self.rank]), base)
        count = int(counts[self.rank, peer])
        begin = words.private(SLOT, self._before(counts[self.rank], peer), count)
        return Move(begin.src, begin.dst, self.problem.bytes_of(self.rank, peer, door))

    def poison(self) -> None:
        """Where peers write: whatever is there then has come later."""
        for name in ("in_head", "in_record", "in_row"):
            region = self.problem.areas.bulk[name]
            ctypes.memset(self.bulk + region.offset, _POISON, region.nbytes)

    def check(self, doors: Collection[Door] = (Door.HEAD, Door.RECORDS, Door.ROWS)) -> None:
        """Raise ``TransportError`` unless all that this rank receives is there, and right.

        ``doors``: RECORDS stands for all records.
        """
        for door, peer, found, expected in self._received(doors):
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                raise TransportError(
                    f"rank {self.rank}: {door.name.lower()} of rank {peer}: word {wrong[0]} of "
                    f"{len(found)} is {int(found[wrong[0]]):#x}, not {int(expected[wrong[0]]):#x}; "
                    f"{len(wrong)} are wrong",
                    peer=peer,
                    operation="bench",
                )

    def word(self, index: int) -> ctypes.c_int64:
        """One of ``flags``."""
        return ctypes.c_int64.from_address(self.flags + WORD * index)

    def at(self, offset: int, nbytes: int) -> NDArray[np.int64]:
        """Words of ``bulk``."""
        words = (ctypes.c_int64 * (nbytes // WORD)).from_address(self.bulk + offset)
        return np.ctypeslib.as_array(words)

    def _received(
        self, doors: Collection[Door]
    ) -> Iterator[tuple[Door, int, NDArray[np.int64], NDArray[np.int64]]]:
        for peer, door in itertools.product(self.problem.others(self.rank), doors):
            theirs = Bytes(self.problem, peer, 0, 0)
            move = theirs.whole(door, self.rank)
            expected = self.problem.content(door, peer, self.rank)
            yield door, peer, self.at(move.dst, move.nbytes), expected

    def _before(self, counts: NDArray[np.int64], peer: int) -> int:
        """Of the remote ranks before ``peer``."""
        return sum(int(counts[lower]) for lower in range(peer) if lower != self.rank)
