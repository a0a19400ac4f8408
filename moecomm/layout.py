"""Every size and byte offset of one exchange, computed once.

``Layout`` is pure arithmetic on Python integers; where its regions lie is in ``regions``. Device
code gets the same numbers as text (``defines``) or as a table (``constants``); nothing else in the
package computes an offset.

Letters: R ranks, D replicas, G = R/D source groups, E experts, L local experts (``Lmax`` on the
rank that has most), T ``max_tokens``, K ``top_k``, H ``hidden``, S scales a row, F ``in_flight``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from moecomm import regions
from moecomm.arena import ALIGN, Arena, round_up
from moecomm.config import MAX_RANKS, MoeConfig
from moecomm.dtypes import itemsize
from moecomm.errors import ConfigError
from moecomm.remote import EXTRA_HEAD_WORDS, Remote, RemoteAreas

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
        return round_up(self._meta_used, 16 if self.lines else LINE_BYTES)

    @property
    def _meta_used(self) -> int:
        return 16 + 12 * self.cfg.top_k

    @property
    def record_row_offset(self) -> int:
        return self.meta_bytes

    @cached_property
    def record_scale_offset(self) -> int:
        return self.record_row_offset + round_up(self.wire_row_bytes, 16)

    @cached_property
    def record_image_bytes(self) -> int:
        """One token for one rank: meta | row | scales, each from a 16-byte boundary. Where it is
        stored as it is, rows begin on a line of memory: a warp's 512 bytes are four, not five."""
        end = self.record_scale_offset + 4 * self.cfg.num_scales
        return round_up(end, 16 if self.lines else LINE_BYTES)

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
        cfg = self.cfg
        parts = (self._meta_used, self.wire_row_bytes, 4 * cfg.num_scales)
        image = sum(round_up(part, 16) for part in parts)
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

    # ---- regions, and what device code is told of them ----------------------------------------

    @cached_property
    def symmetric(self) -> Arena:
        """What peers write to. The same on every rank."""
        return regions.symmetric(self)

    @cached_property
    def local(self) -> Arena:
        """What only this rank's kernels and its host touch, received rows included."""
        return regions.local(self)

    @cached_property
    def areas(self) -> RemoteAreas | None:
        """What remote peers need; ``None`` where there are none."""
        return None if self.remote is None else RemoteAreas(self, self.remote)

    @cached_property
    def recv_slot_bytes(self) -> int:
        """Bytes of one slot's ``recv.x``, padded so that every slot starts aligned."""
        return round_up(self.slot_rows * self.recv_row_bytes, ALIGN)

    @cached_property
    def constants(self) -> dict[str, int]:
        """Name → value, equal on all ranks (what differs travels in the launch arguments)."""
        return regions.constants(self)

    def defines(self) -> dict[str, str]:
        """``constants`` as C literals, for kernels compiled for this very problem."""
        return {name: f"{value}ull" for name, value in self.constants.items()}


def line_bytes(nbytes: int) -> int:
    """``nbytes`` in 128-byte lines that carry 120 bytes each."""
    return -(-nbytes // LINE_DATA_BYTES) * LINE_BYTES
