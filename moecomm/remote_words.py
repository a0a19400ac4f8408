"""What a mover of proxied remote peers reads, writes and moves: positions, as plain numbers.

``docs/protocol.md`` ("Remote peers") says when. Everything counts from the two areas of
``moecomm.remote.RemoteAreas``: words from the beginning of ``flags``, bytes from that of ``bulk``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from moecomm.remote import (
    CHANNEL_ACK,
    CHANNEL_HEAD,
    CHANNEL_RECORDS,
    DOOR_WORDS,
    HALVES,
    PLAN_WORDS,
    WORD,
    RemoteAreas,
)


class Door(IntEnum):
    """Words by which a kernel says that something is packed; it releases the epoch there."""

    HEAD = 0
    PRIVATE = 1
    RECORDS = 2
    ROWS = 3
    ACK = 4


TICKETS: Final = 5  # words behind the doors, one a receiving half
# A ticket: a number by which the host wants to be told that all has landed, and below it these many
# low bits of the epoch that is meant.
TICKET_BITS: Final = 24
FREE: Final = 1 << 62  # `landed` for good: nobody is to wait any more


class Plan(IntEnum):
    """Numbers about one peer. ``RECORD_*`` are valid with door HEAD, ``ROW_*`` with door ROWS."""

    RECORD_FIRST = 0
    RECORD_COUNT = 1
    ROW_FIRST = 2
    ROW_COUNT = 3
    ROW_BASE = 4


class Kind(IntEnum):
    """What a write carries; the top bits of its immediate."""

    HEAD = 0
    PRIVATE = 1
    RECORDS = 2
    ROWS = 3
    ACK = 4
    ABORT = 5
    PING = 6
    LEAVE = 7


EPOCH_BITS: Final = 13
RANK_BITS: Final = 10
SLOT_BITS: Final = 6
EPOCH_MASK: Final = (1 << EPOCH_BITS) - 1


def immediate(kind: int, slot: int, source: int, epoch: int) -> int:
    """The 32 bits that tell a receiver what has come: kind, slot, source rank, low epoch bits."""
    high = (kind << SLOT_BITS | slot) << RANK_BITS | source
    return high << EPOCH_BITS | epoch & EPOCH_MASK


def parse(imm: int) -> tuple[int, int, int, int]:
    """Kind, slot, source and the low bits of the epoch."""
    pair = imm >> EPOCH_BITS
    source = pair & (1 << RANK_BITS) - 1
    slot = pair >> RANK_BITS & (1 << SLOT_BITS) - 1
    return pair >> RANK_BITS + SLOT_BITS, slot, source, imm & EPOCH_MASK


def next_epoch(before: int, low: int) -> int:
    """The first epoch after ``before`` with these low bits."""
    return before + 1 + (low - before - 1 & EPOCH_MASK)


@dataclass(frozen=True, slots=True)
class Move:
    """``nbytes`` from ``src`` of this rank's bulk to ``dst`` of the peer's."""

    src: int
    dst: int
    nbytes: int


class RemoteWords:
    """Positions for rank ``rank``.

    Word indices, from the beginning of the flags: ``abort_out``, ``abort_in``, ``door``, ``plan``,
    ``landed``, ``arrived``. Moves: ``head``, ``private``, ``records``, ``rows``.
    """

    def __init__(self, areas: RemoteAreas, rank: int) -> None:
        self.areas = areas
        self.rank = rank
        self.abort_out = areas.flags["abort_out"].offset // WORD
        self.abort_in = areas.flags["abort_in"].offset // WORD
        self._door = areas.flags["door"].offset // WORD
        self._plan = areas.flags["plan"].offset // WORD
        self._landed = areas.flags["landed"].offset // WORD
        self._arrived = areas.flags["arrived"].offset // WORD

    def door(self, slot: int, door: int) -> int:
        """Holds the last epoch for which the door was rung."""
        return self._door + slot * DOOR_WORDS + door

    def plan(self, slot: int, rank: int, field: int) -> int:
        """A number about the exchange with ``rank``; see ``Plan``."""
        return self._plan + (slot * self.areas.num_ranks + rank) * PLAN_WORDS + field

    def ticket(self, slot: int, half: int) -> int:
        """Holds the last ticket; ``half``: 0 for dispatch_recv, 1 for combine_recv."""
        return self._door + slot * DOOR_WORDS + TICKETS + half

    def landed(self, slot: int, half: int) -> int:
        """Holds the number of the last ticket of whose epoch everything has come."""
        return self._landed + slot * HALVES + half

    def arrived(self, slot: int, source: int, channel: int) -> int:
        """Holds the last epoch of which ``source`` 's part has come."""
        return (
            self._arrived + (slot * self.areas.num_ranks + source) * self.areas.channels + channel
        )

    def channels(self, kind: int) -> tuple[int, ...]:
        """Which ``arrived`` words of its source a write of this kind sets, in this order."""
        return {
            Kind.HEAD: (CHANNEL_HEAD,),
            Kind.PRIVATE: (CHANNEL_RECORDS,),
            Kind.RECORDS: (CHANNEL_RECORDS + 1,),
            Kind.ROWS: (self.areas.channel_rows, CHANNEL_ACK),
            Kind.ACK: (CHANNEL_ACK,),
            Kind.ABORT: (),
            Kind.PING: (),
            Kind.LEAVE: (),
        }[Kind(kind)]

    def head(self, slot: int, dest: int) -> Move:
        areas = self.areas
        out, into = areas.bulk["out_head"].offset, areas.bulk["in_head"].offset
        pairs = slot * areas.num_ranks
        nbytes = areas.head_bytes
        return Move(out + (pairs + dest) * nbytes, into + (pairs + self.rank) * nbytes, nbytes)

    def private(self, slot: int, first: int, count: int) -> Move:
        """``first``, ``count``: ``Plan.RECORD_FIRST`` and ``RECORD_COUNT`` of the peer."""
        return self._records(slot, first, 0, min(count, self.areas.private_records))

    def records(self, slot: int, first: int, count: int) -> Move:
        """Those that are not private; as ``private``."""
        done = min(count, self.areas.private_records)
        return self._records(slot, first, done, count - done)

    def rows(self, slot: int, first: int, count: int, base: int) -> Move:
        """``Plan.ROW_FIRST``, ``ROW_COUNT`` and ``ROW_BASE`` of the peer."""
        areas = self.areas
        out = slot * areas.staged_rows + first
        into = slot * areas.landing_rows + base
        return Move(
            areas.bulk["out_row"].offset + out * areas.row_bytes,
            areas.bulk["in_row"].offset + into * areas.row_bytes,
            count * areas.row_bytes,
        )

    def _records(self, slot: int, first: int, skip: int, count: int) -> Move:
        areas = self.areas
        out = slot * areas.staged_records + first + skip
        into = (slot * areas.num_ranks + self.rank) * areas.source_records + skip
        return Move(
            areas.bulk["out_record"].offset + out * areas.record_bytes,
            areas.bulk["in_record"].offset + into * areas.record_bytes,
            count * areas.record_bytes,
        )
