"""Small problems of the reference's tests, worked out by hand there."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from payload import global_ids, payload

from moecomm.config import MoeConfig

BF16 = np.dtype(ml_dtypes.bfloat16)


def config(**fields: Any) -> MoeConfig:
    return MoeConfig(**{"num_experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 3, **fields})


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


def tokens(group: int, num_tokens: int, cfg: MoeConfig) -> np.ndarray:
    return payload(global_ids(group, num_tokens, cfg.max_tokens), cfg.hidden)


# Two ranks; experts 0, 1 on rank 0 and 2, 3 on rank 1. Rank 0 has 3 tokens, rank 1 has 2.
TWO = [ids([0, 2], [2, 1], [0, -1]), ids([3, 0], [2, 0])]


def two_ranks(**fields: Any) -> tuple[MoeConfig, list[np.ndarray]]:
    cfg = config(**fields)
    return cfg, [tokens(0, 3, cfg), tokens(1, 2, cfg)]
