"""What a machine with many GPUs is asked: everything in one start of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_graphs
import gpu_ranks

import moecomm as mc

Configs = list[tuple[mc.MoeConfig, str | None]]


def everything(group: mc.Group, configs: Configs) -> list[str]:
    """All parts, one after the other; their names. A failure names its part."""
    cfg, input_dtype = configs[0]
    parts: dict[str, Callable[[], Any]] = {
        "every configuration": lambda: gpu_ranks.exchange_all(group, configs, 6),
        "streams without order": lambda: gpu_ranks.overlap(group, cfg, 20),
        "the first call is captured": lambda: gpu_graphs.first_call_is_captured(
            group, cfg, input_dtype, None
        ),
        "graphs of several sizes": lambda: gpu_graphs.sizes_interleave(group, cfg, 20, None),
        "num_tokens on the device": lambda: gpu_graphs.tokens_on_the_device(group, cfg, None),
        "pieces on several streams": lambda: gpu_graphs.pieces_across_streams(group, cfg, None),
        "opening and closing": lambda: gpu_ranks.open_and_close(group, cfg, 5, None),
    }
    for name, part in parts.items():
        group.barrier(120)
        try:
            part()
        except Exception as error:
            error.add_note(f"in: {name}")
            raise
    return list(parts)
