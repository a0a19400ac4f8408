"""Where the regions of a layout lie, and the constants that tell device code so.

Letters as in ``layout``, whose sizes these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moecomm.arena import Arena
from moecomm.remote import LOCAL_NAMES, NO_REMOTE, WORD

if TYPE_CHECKING:
    from moecomm.layout import Layout

STATS_PHASES: Final = 4
# Numbers that device code compares against.
LAYOUT_CODES: Final = {"batched": 0, "grouped": 1, "rank": 2}


def symmetric(layout: Layout) -> Arena:
    """See ``Layout.symmetric``. Flags first: their place never depends on row sizes."""
    cfg, arena = layout.cfg, Arena()
    slots, tokens = cfg.in_flight, cfg.max_tokens
    records = slots * layout.num_sources * layout.source_tokens
    places = slots * tokens * layout.combine_places
    arena.add("abort", WORD)
    arena.add("roll", (1 + layout.num_ranks) * WORD)
    arena.add("ack", slots * layout.num_ranks * WORD)
    arena.add("head", slots * layout.num_ranks * layout.head_words * WORD)
    arena.add("record_flag", records * WORD)
    arena.add("combine_flag", places * WORD)
    # Lines hold flags, which begin at zero; other rows mean nothing before they are written.
    arena.add("record", records * layout.record_bytes, poison=not layout.lines, payload=True)
    arena.add("combine_row", places * layout.combine_stride, poison=not layout.lines, payload=True)
    return arena


def local(layout: Layout) -> Arena:
    """See ``Layout.local``."""
    cfg, arena = layout.cfg, Arena()
    slots, tokens, top_k = cfg.in_flight, cfg.max_tokens, cfg.top_k
    records, rows = layout.num_groups * tokens, layout.slot_rows
    arena.add("peers", layout.num_ranks * WORD)
    arena.add("epoch", slots * 2 * WORD)
    arena.add("claim", 4 * WORD)
    arena.add("overflowed", slots * WORD)
    arena.add("stat_sent", layout.num_ranks * WORD)
    arena.add("stat_recv", layout.num_groups * WORD)
    arena.add("stat_rows", layout.num_groups * WORD)
    arena.add("stat_expert", layout.max_local_experts * WORD)
    arena.add("stat_wait_ns", STATS_PHASES * layout.num_ranks * WORD)
    arena.add("chunk_flag", slots * layout.count_chunks * WORD)
    words = cfg.num_experts + layout.num_ranks
    arena.add("chunk_count", slots * layout.count_chunks * words * 4, poison=True)
    arena.add("num_tokens", slots * 4, poison=True)
    arena.add("num_records", slots * 4, poison=True)
    arena.add("route", slots * tokens * top_k * 4, poison=True)
    arena.add("num_dest", slots * tokens * 4, poison=True)
    arena.add("weight", slots * tokens * top_k * 4, poison=True)
    arena.add("meta", slots * records * layout.meta_bytes, poison=True)
    arena.add("row_of", slots * records * top_k * 4, poison=True)
    per_row = top_k if cfg.layout == "rank" else 1
    arena.add("counts", slots * layout.max_local_experts * 4, poison=True)
    arena.add("offsets", slots * (layout.max_local_experts + 1) * 4, poison=True)
    arena.add("num_rows", slots * 4, poison=True)
    arena.add("src_rank", slots * rows * 4, poison=True)
    arena.add("src_token", slots * rows * 4, poison=True)
    arena.add("row_expert", slots * rows * top_k * 4 * (cfg.layout == "rank"), poison=True)
    arena.add("row_weight", slots * rows * per_row * 4, poison=True)
    arena.add("x_scale", slots * rows * cfg.recv_scales * 4, poison=True)
    arena.add("x", slots * layout.recv_slot_bytes, poison=True)
    if layout.areas is not None:
        layout.areas.add_local(arena, layout)
    return arena


def constants(layout: Layout) -> dict[str, int]:
    """See ``Layout.constants``."""
    table = _problem(layout) | _wire(layout)
    table |= {f"LOC_{name.upper()}": 0 for name in LOCAL_NAMES}
    table |= NO_REMOTE
    if layout.areas is not None:
        table |= layout.areas.constants
    table |= {f"SYM_{r.name.upper()}": r.offset for r in layout.symmetric}
    table |= {f"LOC_{r.name.upper()}": r.offset for r in layout.local}
    return table


def _problem(layout: Layout) -> dict[str, int]:
    """Who takes part, and with what."""
    cfg = layout.cfg
    share, extra = divmod(cfg.num_experts, layout.num_ranks)
    return {
        "NUM_RANKS": layout.num_ranks,
        "REPLICAS": cfg.replicas,
        "NUM_GROUPS": layout.num_groups,
        "NUM_EXPERTS": cfg.num_experts,
        "EXPERTS_SHARE": share,
        "EXPERTS_EXTRA": extra,
        "MAX_LOCAL": layout.max_local_experts,
        "MAX_TOKENS": cfg.max_tokens,
        "TOP_K": cfg.top_k,
        "HIDDEN": cfg.hidden,
        "NUM_SCALES": cfg.num_scales,
        "RECV_SCALES": cfg.recv_scales,
        "SCALE_BLOCK": (cfg.coded.block if cfg.coded else cfg.scale_block) or 0,
        "SCALE_POW2": int(cfg.scale_pow2),
        "LAYOUT": LAYOUT_CODES[cfg.layout],
        "ALIGNMENT": cfg.expert_alignment,
        "ROWS_PER_RANK": int(layout.rows_per_rank),
        "SENDER_REDUCES": int(cfg.reduce == "sender"),
        "CAPPED": int(layout.capped),
        "CHECK_VALUES": int(cfg.check_values),
    }


def _wire(layout: Layout) -> dict[str, int]:
    """Rows of a slot, and how tokens lie in memory and on the wire."""
    batched = layout.cfg.layout == "batched"
    return {
        "SLOT_ROWS": layout.slot_rows,
        "SLOT_X_BYTES": layout.recv_slot_bytes,
        "CAPACITY": layout.expert_capacity if batched else layout.slot_rows,
        "COUNT_CHUNK": layout.count_chunk,
        "COUNT_CHUNKS": layout.count_chunks,
        "HEAD_WORDS": layout.head_words,
        "PLACES": layout.combine_places,
        "RECV_ROW_BYTES": layout.recv_row_bytes,
        "RECORD_BYTES": layout.record_bytes,
        "RECORD_WORDS": layout.record_image_bytes // WORD,
        "RECORD_ROW_OFF": layout.record_row_offset,
        "RECORD_SCALE_OFF": layout.record_scale_offset,
        "META_BYTES": layout.meta_bytes,
        "COMBINE_ROW_BYTES": layout.combine_row_bytes,
        "COMBINE_STRIDE": layout.combine_stride,
        "NUM_SOURCES": layout.num_sources,
        "SOURCE_TOKENS": layout.source_tokens,
    }
