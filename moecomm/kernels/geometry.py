"""How many blocks and threads a stage runs on. Any choice gives the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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


def shared_bytes(stage: str, layout: Layout) -> int:
    words = {
        "dispatch_send": layout.cfg.num_experts + layout.num_ranks,
        "dispatch_recv": (layout.num_groups + 1) * (layout.max_local_experts + 2) + 2,
    }
    return SMEM_STRUCT_BYTES + 4 * words.get(stage, 0)


def geometry(stage: str, layout: Layout, machine: Machine, num_tokens: int) -> Geometry:
    """Launch shape for ``num_tokens`` tokens here (the receiving stages may hold more).

    dispatch_send has one block that counts beside those that send.
    """
    cfg = layout.cfg
    work = num_tokens + 1
    if stage in ("dispatch_recv", "combine_send"):
        work = layout.num_groups * cfg.max_tokens
    limit = machine.max_blocks if cfg.num_sms is None else min(machine.max_blocks, cfg.num_sms)
    return Geometry(max(1, min(work, limit)), machine.threads, shared_bytes(stage, layout))
