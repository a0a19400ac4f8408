"""Every size and byte offset of one exchange, computed once.

``Layout`` is pure arithmetic on Python integers. Device code gets the same numbers as text
(``defines``) or as a table (``values``); nothing else in the package computes an offset.

Letters: R ranks, D replicas, G = R/D source groups, E experts, L local experts (``Lmax`` on the
rank that has most), T ``max_tokens``, K ``top_k``, H ``hidden``, S scales a row, F ``in_flight``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from moecomm.arena import ALIGN, Arena, round_up
from moecomm.config import MAX_RANKS, MoeConfig
from moecomm.dtypes import itemsize
from moecomm.errors import ConfigError
from moecomm.remote import EXTRA_HEAD_WORDS, LOCAL_NAMES, NO_REMOTE, Remote, RemoteAreas

WORD: Final = 8
LINE_BYTES: Final = 128
LINE_DATA_BYTES: Final = 120  # the last word of a line is its flag
LINES_MAX_TOKENS: Final = 512
LINES_MAX_IMAGE_BYTES: Final = 96 * 1024  # of shared memory; a multiprocessor has 227 KiB
# Counting before sending: a batch of more tokens is divided among blocks, in chunks of so many at
# least, and in so many at most.
UNDIVIDED_TOKENS: Final = 512
LEAST_CHUNK: Final = 128
MOST_CHUNKS: Final = 32
MAX_ROWS: Final = 2**31 - 1  # row numbers are int32 for the caller (grouped GEMM kernels want that)

# Numbers that device code compares against; `defines` hands them over by name.
LAYOUT_CODES: Final = {"batched": 0, "grouped": 1, "rank": 2}
STATS_PHASES: Final = 4


class Layout:
    """Sizes and offsets of ``cfg`` on ``rank`` of ``num_ranks``.

    ``remote``: some rank has peers that its kernels cannot reach, and this is how they are served.

    Raises:
        ConfigError: ``num_ranks`` is out of range, does not divide by ``replicas``, or the
            receive area has more rows than an int32 counts.
    """

    def __init__(
        self, cfg: MoeConfig, num_ranks: int, rank: int, remote: Remote | None = None
    ) -> None:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ConfigError(f"num_ranks={num_ranks}: must be from 1 to {MAX_RANKS}")
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank={rank}: must be from 0 to num_ranks-1={num_ranks - 1}")
        if num_ranks % cfg.replicas:
            raise ConfigError(f"replicas={cfg.replicas}: must divide num_ranks={num_ranks}")
        if cfg.wire == "lines" and remote is not None:
            raise ConfigError(
                "wire='lines': needs peers that kernels can store to, and here some are reached "
                "over the network only"
            )
        self.cfg = cfg
        self.num_ranks = num_ranks
        self.rank = rank
        self.num_groups = num_ranks // cfg.replicas
        self.remote = remote
        if self.slot_rows > MAX_ROWS:
            raise ConfigError(
                f"receive area of {self.slot_rows} rows: at most {MAX_ROWS}; lower max_tokens "
                "or set max_recv_tokens"
            )

    # ---- experts -------------------------------------------------------------------------

    def expert_range(self, rank: int) -> range:
        """Global ids of the experts on ``rank``: the first ``E % R`` ranks host one more."""
        share, extra = divmod(self.cfg.num_experts, self.num_ranks)
        first = rank * share + min(rank, extra)
        return range(first, first + share + (rank < extra))

    @cached_property
    def num_local_experts(self) -> int:
        return len(self.expert_range(self.rank))

    @cached_property
    def max_local_experts(self) -> int:
        return -(-self.cfg.num_experts // self.num_ranks)

    # ---- rows ----------------------------------------------------------------------------

    @cached_property
    def expert_capacity(self) -> int:
        """Rows of one expert in the ``batched`` layout."""
        return self.cfg.max_recv_tokens or self.num_groups * self.cfg.max_tokens

    @cached_property
    def recv_rows(self) -> int:
        """Rows of ``recv.x`` here: exact worst case, or what ``max_recv_tokens`` allows."""
        return self._rows(self.num_local_experts)

    @cached_property
    def slot_rows(self) -> int:
        """Rows set aside for one handle: ``recv_rows`` of the rank with most experts, so that
        offsets are the same everywhere."""
        return self._rows(self.max_local_experts)

    def _rows(self, num_local: int) -> int:
        cfg = self.cfg
        tokens = self.num_groups * cfg.max_tokens
        if cfg.layout == "batched":
            return num_local * self.expert_capacity
        if cfg.max_recv_tokens is not None:
            return cfg.max_recv_tokens
        if cfg.layout == "rank":
            return tokens if num_local else 0
        # grouped: `rows` tokens in all, at most `tokens` an expert. One row opens an expert's
        # first aligned unit; each further unit takes `alignment` more rows, as long as some
        # expert has units left.
        align = cfg.expert_alignment
        rows = tokens * min(cfg.top_k, num_local)
        opened = min(num_local, rows)
        further = min((rows - opened) // align, num_local * (-(-tokens // align) - 1))
        return align * (opened + further)

    @cached_property
    def recv_shape(self) -> tuple[int, ...]:
        """Shape of ``recv.x``, and of ``y``."""
        if self.cfg.layout == "batched":
            return self.num_local_experts, self.expert_capacity, self.cfg.hidden
        return self.recv_rows, self.cfg.hidden

    # ---- bytes ---------------------------------------------------------------------------

    @cached_property
    def wire_row_bytes(self) -> int:
        return self.cfg.hidden * itemsize(self.cfg.wire_dtype)

    @cached_property
    def recv_row_bytes(self) -> int:
        """A row of ``recv.x``."""
        return self.cfg.hidden * itemsize(self.cfg.recv_dtype)

    @cached_property
    def combine_row_bytes(self) -> int:
        return self.cfg.hidden * itemsize(self.cfg.combine_dtype)

    @cached_property
    def meta_bytes(self) -> int:
        """Token, combine place, group, spare; then expert, place and weight of every slot."""
        return round_up(16 + 12 * self.cfg.top_k, 16)

    @property
    def record_row_offset(self) -> int:
        return self.meta_bytes

    @cached_property
    def record_scale_offset(self) -> int:
        return self.record_row_offset + round_up(self.wire_row_bytes, 16)

    @cached_property
    def record_image_bytes(self) -> int:
        """One token for one rank: meta | row | scales, each from a 16-byte boundary."""
        return round_up(self.record_scale_offset + 4 * self.cfg.num_scales, 16)

    @cached_property
    def record_bytes(self) -> int:
        """What a record takes on the wire."""
        image = self.record_image_bytes
        return line_bytes(image) if self.lines else image

    @cached_property
    def combine_stride(self) -> int:
        """What a returned row takes on the wire."""
        row = round_up(self.combine_row_bytes, 16)
        return line_bytes(row) if self.lines else row

    @property
    def combine_pieces(self) -> int:
        """Pieces of a returned row that travels as lines: what one warp handles at a time."""
        return -(-round_up(self.combine_row_bytes, 16) // (4 * LINE_DATA_BYTES))

    @cached_property
    def lines(self) -> bool:
        """Whether flags travel inside the data (see ``MoeConfig.wire``)."""
        cfg, image = self.cfg, self.record_image_bytes
        whole = self.wire_row_bytes % 16 == 0 and self.combine_row_bytes % 16 == 0
        if cfg.wire == "lines" and not whole:
            raise ConfigError(
                f"wire='lines': rows must be multiples of 16 bytes, but hidden={cfg.hidden} "
                f"makes {self.wire_row_bytes} (dispatch) and {self.combine_row_bytes} (combine)"
            )
        fits = image <= LINES_MAX_IMAGE_BYTES
        if cfg.wire == "lines" and not fits:
            raise ConfigError(
                f"wire='lines': a token with its scales and routing must be at most "
                f"{LINES_MAX_IMAGE_BYTES} bytes, but hidden={cfg.hidden} makes {image}"
            )
        small = cfg.max_tokens <= LINES_MAX_TOKENS and self.remote is None
        return cfg.wire == "lines" or (cfg.wire == "auto" and small and whole and fits)

    @cached_property
    def combine_places(self) -> int:
        """Rows one token can get back: one a slot, or one a rank when the sender reduces."""
        return self.max_destinations if self.rows_per_rank else self.cfg.top_k

    @property
    def max_destinations(self) -> int:
        """Most ranks that one token goes to."""
        return min(self.cfg.top_k, self.num_ranks)

    @property
    def rows_per_rank(self) -> bool:
        """Whether combine carries one row per (token, rank)."""
        return self.cfg.layout == "rank" or self.cfg.reduce == "sender"

    @property
    def capped(self) -> bool:
        return self.cfg.max_recv_tokens is not None

    @property
    def num_sources(self) -> int:
        """Areas for records. Replicas share one, whose numbering is their group's; where a peer is
        remote, each source rank has one of its own, without gaps."""
        return self.num_groups if self.remote is None else self.num_ranks

    @property
    def source_tokens(self) -> int:
        """Records of one such area."""
        tokens, replicas = self.cfg.max_tokens, self.cfg.replicas
        return tokens if self.remote is None else -(-tokens // replicas)

    @cached_property
    def head_words(self) -> int:
        """Words a source tells each rank: its number of records, then a count per local expert.

        With a cap every rank must find the same overflow, so each also learns everybody's
        counts: of all ranks (``rank`` layout) or of all experts.
        """
        extra = 0 if self.remote is None else EXTRA_HEAD_WORDS
        return 1 + self.max_local_experts + self.cap_words + extra

    @property
    def cap_words(self) -> int:
        if not self.capped:
            return 0
        return self.num_ranks if self.cfg.layout == "rank" else self.cfg.num_experts

    @cached_property
    def count_chunk(self) -> int:
        """Tokens that one block of dispatch_send counts for all; small batches are not divided."""
        tokens = self.cfg.max_tokens
        return tokens if tokens <= UNDIVIDED_TOKENS else max(LEAST_CHUNK, -(-tokens // MOST_CHUNKS))

    @property
    def count_chunks(self) -> int:
        return -(-self.cfg.max_tokens // self.count_chunk)

    # ---- arenas --------------------------------------------------------------------------

    @cached_property
    def symmetric(self) -> Arena:
        """What peers write to. The same on every rank. Flags first: their place never depends
        on row sizes."""
        cfg, arena = self.cfg, Arena()
        slots, tokens = cfg.in_flight, cfg.max_tokens
        records = slots * self.num_sources * self.source_tokens
        places = slots * tokens * self.combine_places
        arena.add("abort", WORD)
        arena.add("roll", (1 + self.num_ranks) * WORD)
        arena.add("ack", slots * self.num_ranks * WORD)
        arena.add("head", slots * self.num_ranks * self.head_words * WORD)
        arena.add("record_flag", records * WORD)
        arena.add("combine_flag", places * WORD)
        # Lines hold flags, which begin at zero; other rows mean nothing before they are written.
        arena.add("record", records * self.record_bytes, poison=not self.lines, payload=True)
        arena.add("combine_row", places * self.combine_stride, poison=not self.lines, payload=True)
        return arena

    @cached_property
    def local(self) -> Arena:
        """What only this rank's kernels and its host touch, received rows included."""
        cfg, arena = self.cfg, Arena()
        slots, tokens, top_k = cfg.in_flight, cfg.max_tokens, cfg.top_k
        records, rows = self.num_groups * tokens, self.slot_rows
        arena.add("peers", self.num_ranks * WORD)
        arena.add("epoch", slots * 2 * WORD)
        arena.add("claim", 4 * WORD)
        arena.add("overflowed", slots * WORD)
        arena.add("stat_sent", self.num_ranks * WORD)
        arena.add("stat_recv", self.num_groups * WORD)
        arena.add("stat_rows", self.num_groups * WORD)
        arena.add("stat_expert", self.max_local_experts * WORD)
        arena.add("stat_wait_ns", STATS_PHASES * self.num_ranks * WORD)
        arena.add("chunk_flag", slots * self.count_chunks * WORD)
        words = cfg.num_experts + self.num_ranks
        arena.add("chunk_count", slots * self.count_chunks * words * 4, poison=True)
        arena.add("num_tokens", slots * 4, poison=True)
        arena.add("num_records", slots * 4, poison=True)
        arena.add("route", slots * tokens * top_k * 4, poison=True)
        arena.add("num_dest", slots * tokens * 4, poison=True)
        arena.add("weight", slots * tokens * top_k * 4, poison=True)
        arena.add("meta", slots * records * self.meta_bytes, poison=True)
        arena.add("row_of", slots * records * top_k * 4, poison=True)
        per_row = top_k if cfg.layout == "rank" else 1
        arena.add("counts", slots * self.max_local_experts * 4, poison=True)
        arena.add("offsets", slots * (self.max_local_experts + 1) * 4, poison=True)
        arena.add("num_rows", slots * 4, poison=True)
        arena.add("src_rank", slots * rows * 4, poison=True)
        arena.add("src_token", slots * rows * 4, poison=True)
        arena.add("row_expert", slots * rows * top_k * 4 * (cfg.layout == "rank"), poison=True)
        arena.add("row_weight", slots * rows * per_row * 4, poison=True)
        arena.add("x_scale", slots * rows * cfg.recv_scales * 4, poison=True)
        arena.add("x", slots * self.recv_slot_bytes, poison=True)
        if self.areas is not None:
            self.areas.add_local(arena, self)
        return arena

    @cached_property
    def areas(self) -> RemoteAreas | None:
        """What remote peers need; ``None`` where there are none."""
        return None if self.remote is None else RemoteAreas(self, self.remote)

    @cached_property
    def recv_slot_bytes(self) -> int:
        """Bytes of one slot's ``recv.x``, padded so that every slot starts aligned."""
        return round_up(self.slot_rows * self.recv_row_bytes, ALIGN)

    # ---- what device code is told ----------------------------------------------------------

    @cached_property
    def constants(self) -> dict[str, int]:
        """Name → value, equal on all ranks (what differs travels in the launch arguments)."""
        cfg = self.cfg
        share, extra = divmod(cfg.num_experts, self.num_ranks)
        table = {
            "NUM_RANKS": self.num_ranks,
            "REPLICAS": cfg.replicas,
            "NUM_GROUPS": self.num_groups,
            "NUM_EXPERTS": cfg.num_experts,
            "EXPERTS_SHARE": share,
            "EXPERTS_EXTRA": extra,
            "MAX_LOCAL": self.max_local_experts,
            "MAX_TOKENS": cfg.max_tokens,
            "TOP_K": cfg.top_k,
            "HIDDEN": cfg.hidden,
            "NUM_SCALES": cfg.num_scales,
            "RECV_SCALES": cfg.recv_scales,
            "SCALE_BLOCK": (cfg.coded.block if cfg.coded else cfg.scale_block) or 0,
            "SCALE_POW2": int(cfg.scale_pow2),
            "LAYOUT": LAYOUT_CODES[cfg.layout],
            "ALIGNMENT": cfg.expert_alignment,
            "ROWS_PER_RANK": int(self.rows_per_rank),
            "SLOT_ROWS": self.slot_rows,
            "SLOT_X_BYTES": self.recv_slot_bytes,
            "CAPACITY": self.expert_capacity if cfg.layout == "batched" else self.slot_rows,
            "SENDER_REDUCES": int(cfg.reduce == "sender"),
            "CAPPED": int(self.capped),
            "CHECK_VALUES": int(cfg.check_values),
            "COUNT_CHUNK": self.count_chunk,
            "COUNT_CHUNKS": self.count_chunks,
            "HEAD_WORDS": self.head_words,
            "PLACES": self.combine_places,
            "RECV_ROW_BYTES": self.recv_row_bytes,
            "RECORD_BYTES": self.record_bytes,
            "RECORD_WORDS": self.record_image_bytes // WORD,
            "RECORD_ROW_OFF": self.record_row_offset,
            "RECORD_SCALE_OFF": self.record_scale_offset,
            "META_BYTES": self.meta_bytes,
            "COMBINE_ROW_BYTES": self.combine_row_bytes,
            "COMBINE_STRIDE": self.combine_stride,
            "NUM_SOURCES": self.num_sources,
            "SOURCE_TOKENS": self.source_tokens,
        }
        table |= {f"LOC_{name.upper()}": 0 for name in LOCAL_NAMES}
        table |= NO_REMOTE
        if self.areas is not None:
            table |= self.areas.constants
        table |= {f"SYM_{r.name.upper()}": r.offset for r in self.symmetric}
        table |= {f"LOC_{r.name.upper()}": r.offset for r in self.local}
        return table

    def defines(self) -> dict[str, str]:
        """``constants`` as C literals, for kernels compiled for this very problem."""
        return {name: f"{value}ull" for name, value in self.constants.items()}


def line_bytes(nbytes: int) -> int:
    """``nbytes`` in 128-byte lines that carry 120 bytes each."""
    return -(-nbytes // LINE_DATA_BYTES) * LINE_BYTES
