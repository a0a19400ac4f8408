"""Peers that kernels cannot load from and store to: what is set aside to exchange with them.

Bytes for such a *remote* peer are packed into a staging area of the rank's own and moved in bulk
by a *mover*: a host thread that posts writes (``"proxied"``), or the kernel itself with NVSHMEM's
put-with-signal (``"nvshmem"``). ``docs/protocol.md`` has the protocol; this module has the sizes.
It is pure arithmetic, like ``layout``.

Letters as in ``layout``; Ts is ``ceil(T / D)``, what one rank sends to another at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from moecomm.arena import Arena, round_up
from moecomm.errors import ConfigError

if TYPE_CHECKING:
    from moecomm.layout import Layout

WORD: Final = 8
MAX_SLOTS: Final = 64  # 6 bits of an immediate
MODES: Final = {"proxied": 1, "nvshmem": 2}

DOOR_WORDS: Final = 16  # of one slot: a cache line
# What a mover tells the kernel about one source; then come the chunks of records and of rows.
CHANNEL_HEAD: Final = 0
CHANNEL_ACK: Final = 1
CHANNEL_RECORDS: Final = 2
PLAN_WORDS: Final = 8  # of one slot and peer
HALVES: Final = 2  # that receive: dispatch_recv, combine_recv
PUSHED_DOORS: Final = 4  # those that push rings: all but ACK
EXTRA_HEAD_WORDS: Final = 2  # where returned rows land at the source; records of this very replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """How remote peers are served. Must be equal on every rank of a group.

    Args:
        mode: who moves bytes: ``"proxied"``, a host thread; ``"nvshmem"``, the kernels.
        private_records: proxied: records for each peer that leave before the others are packed.
        chunk: nvshmem: records, or rows, that one put carries.
        bounce: proxied: kernels work on an image of ``bulk``, and carry bytes between it and the
            memory that the network reaches. Ranks may differ in this one.

    Raises:
        ConfigError: a field breaks its rule.
    """

    mode: Literal["proxied", "nvshmem"]
    private_records: int = 32
    chunk: int = 8
    bounce: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: must be one of {', '.join(map(repr, MODES))}")
        for name in ("private_records", "chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be an integer from 1")
        if self.bounce and self.mode != "proxied":
            raise ConfigError(f"bounce={self.bounce!r}: only with mode='proxied'")


class RemoteAreas:
    """Sizes of what a rank sets aside, for ``layout`` and its ``remote``.

    Attributes:
        flags: words that kernels and mover tell each other by. proxied: memory of the host that
            the GPU maps; nvshmem: symmetric memory. Begins as zeros.
        bulk: staging and landing areas. Memory that the network can write to and read.
    """

    def __init__(self, layout: Layout, remote: Remote) -> None:
        cfg = layout.cfg
        if cfg.in_flight > MAX_SLOTS:
            raise ConfigError(
                f"in_flight={cfg.in_flight}: at most {MAX_SLOTS} with peers that kernels "
                "cannot reach"
            )
        self.proxied = remote.mode == "proxied"
        self.bounce = remote.bounce
        self.mode = MODES[remote.mode]
        self.private_records = remote.private_records
        self.chunk = remote.chunk
        self.slots, self.num_ranks, self.num_groups = (
            cfg.in_flight,
            layout.num_ranks,
            layout.num_groups,
        )
        self.head_words = layout.head_words
        self.head_bytes = round_up(layout.head_words * WORD, 16)
        self.record_bytes, self.row_bytes = layout.record_bytes, layout.combine_stride
        # One rank's share of its group's tokens, to one rank; and to all ranks together.
        self.source_records = layout.source_tokens
        self.staged_records = layout.source_tokens * layout.max_destinations
        # Rows that a rank owes one source, and all source groups: replicas get the same rows.
        each = 1 if layout.rows_per_rank else min(cfg.top_k, layout.max_local_experts)
        self.source_rows = cfg.max_tokens * each
        staged = layout.num_groups * self.source_rows
        self.staged_rows = min(staged, layout.slot_rows) if layout.capped else staged
        self.landing_rows = cfg.max_tokens * layout.combine_places
        self.flags = self._flags()
        self.bulk = self._bulk()

    @property
    def arenas(self) -> tuple[Arena, Arena]:
        """``flags`` and ``bulk``."""
        return self.flags, self.bulk

    @property
    def record_chunks(self) -> int:
        """Arrivals of one source's records: the private ones, the others; or one a put."""
        return 2 if self.proxied else -(-self.source_records // self.chunk)

    @property
    def row_chunks(self) -> int:
        return 1 if self.proxied else -(-self.source_rows // self.chunk)

    @property
    def channel_rows(self) -> int:
        """The first channel of returned rows."""
        return CHANNEL_RECORDS + self.record_chunks

    @property
    def channels(self) -> int:
        return self.channel_rows + self.row_chunks

    def _flags(self) -> Arena:
        arena = Arena()
        pairs = self.slots * self.num_ranks
        proxied = int(self.proxied)
        arena.add("abort_out", WORD * proxied)
        arena.add("abort_in", WORD * proxied)
        arena.add("door", self.slots * DOOR_WORDS * WORD * proxied)
        arena.add("plan", pairs * PLAN_WORDS * WORD * proxied)
        arena.add("landed", self.slots * HALVES * WORD * proxied)
        arena.add("arrived", pairs * self.channels * WORD)
        return arena

    def _bulk(self) -> Arena:
        arena, slots = Arena(), self.slots
        heads = slots * self.num_ranks * self.head_bytes
        arena.add("out_head", heads, poison=True)
        arena.add("in_head", heads, poison=True)
        arena.add("out_record", slots * self.staged_records * self.record_bytes, poison=True)
        landing = slots * self.num_ranks * self.source_records
        arena.add("in_record", landing * self.record_bytes, poison=True)
        arena.add("out_row", slots * self.staged_rows * self.row_bytes, poison=True)
        arena.add("in_row", slots * self.landing_rows * self.row_bytes, poison=True)
        return arena

    def add_local(self, arena: Arena, layout: Layout) -> None:
        """What the kernels keep for themselves, in the local workspace."""
        pairs = self.slots * self.num_ranks
        words = pairs * self.channels * WORD * self.proxied
        arena.add("relay", words)
        arena.add("relay_claim", words)
        arena.add("remote_base", self.num_ranks * WORD)
        arena.add("packed", self.slots * self.counters(layout) * 4)
        tokens = self.slots * layout.cfg.max_tokens
        arena.add("return_row", tokens * layout.cfg.top_k * 4, poison=True)
        arena.add("return_base", pairs * 4, poison=True)
        arena.add("row_base", pairs * 4, poison=True)
        arena.add("staged_first", self.slots * (self.num_groups + 1) * 4, poison=True)
        self._add_bounce(arena)

    def _add_bounce(self, arena: Arena) -> None:
        """What the stages, push and pull tell each other by."""
        slots, pairs = self.slots * self.bounce, self.slots * self.num_ranks * self.bounce
        arena.add("rung", slots * DOOR_WORDS * WORD)
        arena.add("plan", pairs * PLAN_WORDS * WORD)
        arena.add("pushed", slots * HALVES * WORD)
        arena.add("push_parts", slots * PUSHED_DOORS * 2 * 4)
        arena.add("pulled", slots * HALVES * WORD)
        arena.add("pull_claim", slots * HALVES * WORD)
        arena.add("pull_go", slots * HALVES * 2 * WORD)
        arena.add("pull_here", slots * HALVES * WORD)
        arena.add("pull_parts", slots * HALVES * 2 * 4)
        arena.add("pull_count", pairs * 2 * 4, poison=True)
        arena.add("return_count", pairs * 4, poison=True)

    def counters(self, layout: Layout) -> int:
        """Counters a slot. proxied: blocks that are done, for three doors; nvshmem: what each
        chunk holds so far."""
        if self.proxied:
            return 3
        return self.num_ranks * self.record_chunks + layout.num_groups * self.row_chunks

    @property
    def constants(self) -> dict[str, int]:
        """What device code is told beside ``NO_REMOTE``'s names: ``FLG_*`` and ``BLK_*``."""
        table = {
            "REMOTE": self.mode,
            "BOUNCE": int(self.bounce),
            "PRIVATE_RECORDS": self.private_records,
            "REMOTE_CHUNK": self.chunk,
            "HEAD_BYTES": self.head_bytes,
            "STAGED_RECORDS": self.staged_records,
            "STAGED_ROWS": self.staged_rows,
            "LANDING_ROWS": self.landing_rows,
            "RECORD_CHUNKS": self.record_chunks,
            "ROW_CHUNKS": self.row_chunks,
            "CHANNELS": self.channels,
            "DOOR_WORDS": DOOR_WORDS,
            "PLAN_WORDS": PLAN_WORDS,
            "LANDED_WORDS": self.slots * HALVES,
        }
        table |= {f"FLG_{r.name.upper()}": r.offset for r in self.flags}
        table |= {f"BLK_{r.name.upper()}": r.offset for r in self.bulk}
        return table


LOCAL_NAMES: Final = (
    "relay", "relay_claim", "remote_base", "packed", "return_row", "return_base", "row_base",
    "staged_first", "rung", "plan", "pushed", "push_parts", "pulled", "pull_claim", "pull_go",
    "pull_here", "pull_parts", "pull_count", "return_count",
)  # fmt: skip
# The same names where every peer is reachable: device code mentions them, and never uses them.
NO_REMOTE: Final = {
    **dict.fromkeys(
        (
            "REMOTE", "BOUNCE", "PRIVATE_RECORDS", "HEAD_BYTES", "STAGED_RECORDS", "STAGED_ROWS",
            "LANDING_ROWS", "RECORD_CHUNKS", "ROW_CHUNKS", "CHANNELS", "DOOR_WORDS", "PLAN_WORDS",
            "LANDED_WORDS",
            "FLG_ABORT_OUT", "FLG_ABORT_IN", "FLG_DOOR", "FLG_PLAN", "FLG_LANDED", "FLG_ARRIVED",
            "BLK_OUT_HEAD", "BLK_IN_HEAD", "BLK_OUT_RECORD", "BLK_IN_RECORD", "BLK_OUT_ROW",
            "BLK_IN_ROW",
        ),
        0,
    ),
    "REMOTE_CHUNK": 1,
}  # fmt: skip
