"""How many blocks and threads a stage runs on. Any choice gives the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moecomm.arena import round_up
from moecomm.layout import Layout

PLANS: Final = 4  # tokens that a block of dispatch_send has in hand (routing.cuh)
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
class Block:
    """A GPU block: its threads, and how many blocks a multiprocessor holds at least."""

    threads: int
    per_sm: int


# Both leave half of a multiprocessor's 2048 threads to the half that runs beside this one. Measured
# on 2 H200s, 2026-11-30, µs a step: lines, 128 tokens expanded: 27.4 with 512 x 2, 29.2 with
# 1024 x 1; flags, 4096 tokens grouped: 573 with 256 x 4, 662 with 512 x 2, 669 with 128 x 8.
GPU_LINES: Final = Block(threads=512, per_sm=2)
GPU_FLAGS: Final = Block(threads=256, per_sm=4)


def gpu_block(layout: Layout) -> Block:
    return GPU_LINES if layout.lines else GPU_FLAGS


def image_offset(layout: Layout) -> int:
    """Where dispatch_send_lines keeps a token's image in shared memory, behind its counters."""
    return round_up(
        PLANS * SMEM_STRUCT_BYTES + 4 * layout.cfg.num_experts + 12 * layout.num_ranks, 16
    )


def remote_words(layout: Layout) -> int:
    """Shared words that remote peers take beside the others, in either dispatch stage."""
    return 0 if layout.remote is None else 3 * layout.num_ranks + 2


def codec_shared_offset(layout: Layout) -> int:
    """Where dispatch_send keeps one float a warp, behind everything else; with a codec only."""
    fixed = image_offset(layout)
    if not layout.lines:
        return fixed + 4 * remote_words(layout)
    body = layout.record_image_bytes - layout.meta_bytes
    return fixed + body + layout.max_destinations * layout.meta_bytes


def shared_bytes(stage: str, layout: Layout, threads: int) -> int:
    """Dynamic shared memory of one block."""
    structs = SMEM_STRUCT_BYTES * (threads // 32)  # one a warp
    if stage == "dispatch_send":
        largest = 4 * (threads // 32) if layout.cfg.coded is not None else 0
        return codec_shared_offset(layout) + largest
    if stage == "dispatch_recv":
        tables = (layout.num_groups + 2) * (layout.max_local_experts + 2)
        tables += remote_words(layout)
        return structs + 4 * tables
    return structs


def geometry(stage: str, layout: Layout, machine: Machine, num_tokens: int) -> Geometry:
    """Launch shape for ``num_tokens`` tokens here (the receiving stages may hold more).

    The dispatch stages have one block that counts beside those that send or receive.
    """
    cfg = layout.cfg
    records = layout.num_groups * cfg.max_tokens
    work = {
        "dispatch_send": num_tokens + 1,
        "dispatch_recv": records + 1,
        "combine_send": records,
        "combine_recv": num_tokens,
        "release": 1,
    }[stage]
    limit = machine.max_blocks if cfg.num_sms is None else min(machine.max_blocks, cfg.num_sms)
    return Geometry(
        max(1, min(work, limit)), machine.threads, shared_bytes(stage, layout, machine.threads)
    )
