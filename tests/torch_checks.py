"""What ranks got in ``torch_ranks.py``, compared with the reference and with an unsharded layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch_ranks
from payload import assert_same_bits
from torch_ranks import LAYERS

# dtype → largest difference, as a share of the largest value: 24 and 8 significant bits, and a
# few roundings on the way.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def assert_exchanged(name: str, rank: int, found: dict[str, Any]) -> None:
    """Every array of ``Dispatched`` and ``out``; in unused rows, too."""
    case = torch_ranks.exchange_case(name)
    for field in (
        "x", "x_scale", "counts", "offsets", "num_rows", "topk_weights", "topk_idx"
    ):  # fmt: skip
        want = getattr(case.recv[rank], field)
        assert (found[field] is None) == (want is None), field
        if want is not None:
            assert_same_bits(found[field], want, f"rank {rank}: {field}")
    assert_same_bits(found["out"], case.outs[rank], f"rank {rank}: out")


def assert_gradients(
    name: str, mode: str, expected: list[dict[str, Any]], found: list[dict[str, Any]]
) -> None:
    """Of tokens, router weights and experts; ``expected`` is ``dense_layer``'s."""
    limit = TOLERANCE[LAYERS[name].get("dispatch_dtype", "float32")]
    for rank, (whole, mine) in enumerate(zip(expected, found, strict=True)):
        for key, want in whole.items():
            assert mine[key].shape == want.shape
            most = limit * np.abs(want).max()
            assert np.abs(mine[key] - want).max() <= most, f"{name}, {mode}, rank {rank}: {key}"
