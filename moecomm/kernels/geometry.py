"""How many blocks and threads a stage runs on. Any choice gives the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moecomm.arena import round_up
from moecomm.layout import Layout

SMEM_STRUCT_BYTES: Final = (
    1280  # room for the largest shared struct of any stage; device code asserts it
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Launch shape of one stage: ``threads`` is a multiple of 32, ``shared_bytes`` dynamic."""

    blocks: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the launch shape is chosen for."""

    max_blocks: int
    threads: int


# A fiber switch costs nanoseconds and there is one core a rank: few blocks, two warps, so that
# every cross-block and cross-warp step still happens.
EMULATOR: Final = Machine(max_blocks=4, threads=64)


@dataclass(frozen=True, slots=True)
class Grain:
    """How work is cut. Any choice gives the same result.

    ``block_rows``: flags wire: a block moves a row, not a warp. ``pieces``: lines wire: pieces of a
    row that a warp takes at a time (combine_recv takes one, or it spills).
    """

    block_rows: bool
    pieces: int

    @property
    def constants(self) -> dict[str, int]:
        """What device code is told."""
        return {"BLOCK_PER_ROW": int(self.block_rows), "PIECES_AT_ONCE": self.pieces}


@dataclass(frozen=True, slots=True)
class Block:
    """A stage's blocks on a GPU.

    ``per_sm``: a multiprocessor's registers are to do for so many blocks of ``threads``;
    ``used``: how many of them the stage takes, so that the next one finds room beside it.
    """

    threads: int
    per_sm: int
    used: int


# Measured on 2 H200s, 2026-11-30, µs a step: lines, 128 tokens expanded: 27.4 with 512 x 2, 29.2
# with 1024 x 1. With few lines the next half finds room anyway; half of a multiprocessor for each
# costs 27.1 instead of 24.5.
LINES: Final = Block(threads=512, per_sm=2, used=2)
# Many lines: a small sending block, of 64 registers a thread, beside four receiving ones, of 48, is
# all that a multiprocessor holds, so receivers are there when bytes come. Rank layout, 512 tokens:
# 49.7; 53.8 with 512 x 3 of 40 registers (1 sends, 2 receive), 54.8 with LINES; 256: 28.4, LINES
# 31.7; 128: 18.5, LINES 19.4; 64: 14.0, LINES 13.8.
MANY_LINES_SEND: Final = Block(threads=256, per_sm=4, used=1)
MANY_LINES_RECV: Final = Block(threads=256, per_sm=5, used=4)
FEW_LINES_TOKENS: Final = 64
# 4096 tokens grouped: 573 with 256 x 4, 662 with 512 x 2, 669 with 128 x 8. Half of them, so that
# the next half runs beside this one.
FLAGS: Final = Block(threads=256, per_sm=4, used=2)
# Where rows are summed on the way all threads keep enough loads under way, and no fewer.
FLAGS_SUMMING: Final = Block(threads=256, per_sm=4, used=4)

# Push and pull. 2 H200s, PCIe 5 x16: 8 x 512 threads with 4 loads under way each reach what PCIe
# gives, either way (1.75 MiB in 41 µs, the event's 4 µs included); 16 or 64 blocks are no faster.
BOUNCE: Final = Block(threads=512, per_sm=2, used=1)
BOUNCE_BLOCKS: Final = 8


def is_bounce(stage: str) -> bool:
    return stage.endswith(("_push", "_pull"))


def gpu_block(stage: str, layout: Layout) -> Block:
    cfg = layout.cfg
    if is_bounce(stage):
        return BOUNCE
    if not layout.lines:
        return FLAGS_SUMMING if stage == "combine_send" and cfg.reduce == "sender" else FLAGS
    # Where rows are summed before they go back, sending takes all registers.
    if cfg.layout != "rank" or cfg.max_tokens <= FEW_LINES_TOKENS:
        return LINES
    return MANY_LINES_SEND if stage.endswith("_send") else MANY_LINES_RECV


def gpu_machine(stage: str, layout: Layout, multiprocessors: int) -> Machine:
    block = gpu_block(stage, layout)
    return Machine(block.used * multiprocessors, block.threads)


# Rows that a block moves one after the other before its warps had better take one each: in stages
# that have all groups' records, and in those that have this rank's tokens.
RECORDS_A_BLOCK: Final = 4
TOKENS_A_BLOCK: Final = 2
GPU_BLOCKS: Final = 256  # that a GPU runs at a time, about: 2 on each of 132 multiprocessors


def grain(stage: str, layout: Layout, blocks: int, threads: int) -> Grain:
    """For ``blocks`` of so many ``threads`` that run at a time. Stages and ranks may differ.

    2 H200s, 128 tokens, rank layout, flags: 36.7 µs with a warp a row, where 16 blocks combine.
    """
    cfg = layout.cfg
    blocks = blocks if cfg.num_sms is None else min(blocks, cfg.num_sms)
    if stage in ("dispatch_recv", "combine_send"):
        few = layout.num_groups * cfg.max_tokens <= RECORDS_A_BLOCK * blocks
    else:
        few = cfg.max_tokens <= TOKENS_A_BLOCK * blocks
    # Two pieces where all warps have enough to do even so.
    busy = cfg.max_tokens * layout.combine_pieces >= 2 * blocks * threads // 32
    return Grain(few and not layout.lines, 2 if busy and layout.lines else 1)


BY_BLOCKS: Final = Grain(True, 1)  # the kernels in Python are written so


def gpu_grain(stage: str, layout: Layout) -> Grain:
    return grain(stage, layout, GPU_BLOCKS, gpu_block(stage, layout).threads)


def counters_bytes(layout: Layout, plans: int) -> int:
    """Shared memory of dispatch_send's counters, with ``plans`` tokens in hand."""
    counts = 4 * (layout.cfg.num_experts + layout.num_ranks)
    return round_up(plans * SMEM_STRUCT_BYTES + 8 * layout.num_ranks + counts, 16)


def remote_words(layout: Layout) -> int:
    """Shared words that remote peers take beside the others, in either dispatch stage."""
    return 0 if layout.remote is None else 3 * layout.num_ranks + 2


def codec_shared_offset(layout: Layout) -> int:
    """Where dispatch_send keeps one float a warp, behind all else, when a block makes a row; with a
    codec only."""
    if not layout.lines:
        return counters_bytes(layout, 1) + round_up(4 * remote_words(layout), 16)
    body = layout.record_image_bytes - layout.meta_bytes
    return counters_bytes(layout, 1) + body + layout.max_destinations * layout.meta_bytes


def shared_bytes(stage: str, layout: Layout, threads: int) -> int:
    """Dynamic shared memory of one block."""
    if is_bounce(stage):
        return 8 + 8 * layout.num_ranks
    warps = threads // 32
    structs = SMEM_STRUCT_BYTES * warps  # one a warp
    if stage == "dispatch_send":
        codec = 0 if layout.cfg.coded is None else codec_shared_offset(layout) + 4 * warps
        if not layout.lines:
            return max(codec, counters_bytes(layout, warps) + 4 * remote_words(layout))
        return max(codec, codec_shared_offset(layout))
    if stage == "dispatch_recv":
        tables = (layout.num_groups + 2) * (layout.max_local_experts + 2)
        tables += remote_words(layout)
        return structs + 4 * tables
    return structs


def geometry(stage: str, layout: Layout, machine: Machine, num_tokens: int, cut: Grain) -> Geometry:
    """Launch shape for ``num_tokens`` tokens here (the receiving stages may hold more).

    The dispatch stages have one block that counts beside those that send or receive.
    """
    cfg = layout.cfg
    records = layout.num_groups * cfg.max_tokens
    pieces = layout.combine_pieces if layout.lines else 1  # of a returned row
    at_once = 1 if cut.block_rows else machine.threads // 32  # of one block
    work = {
        "dispatch_send": num_tokens + 1,
        "dispatch_recv": records + 1,
        "combine_send": -(-records * -(-pieces // cut.pieces) // at_once),
        "combine_recv": -(-num_tokens * pieces // at_once),
        "release": 1,
    }.get(stage, BOUNCE_BLOCKS)
    limit = machine.max_blocks if cfg.num_sms is None else min(machine.max_blocks, cfg.num_sms)
    return Geometry(
        max(1, min(work, limit)), machine.threads, shared_bytes(stage, layout, machine.threads)
    )
