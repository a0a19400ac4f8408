"""The numbers that stand in kernels, for one problem and launch."""

from __future__ import annotations

from moecomm.kernels.numba_jit.sources import CONSTANTS
from moecomm.kernels.stages import dtype_defines
from moecomm.layout import Layout


def numbers(layout: Layout, stage: str, input_code: int, threads: int) -> list[int]:
    """Values in the order of ``CONSTANTS``; ``threads`` are those of a block."""
    values = {
        **layout.constants,
        **dtype_defines(layout, stage, input_code),
        "NUM_THREADS": threads,
        "NUM_WARPS": threads // 32,
    }
    return [values[name] for name in CONSTANTS]
