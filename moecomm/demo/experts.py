"""SwiGLU experts in plain numpy, and running one rank's experts over the rows it received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moecomm.demo.text import vectors
from moecomm.dtypes import numpy_dtype
from moecomm.reference import dequantize

if TYPE_CHECKING:
    from moecomm.config import MoeConfig
    from moecomm.handle import Received

EXPERT: Final = 3
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Expert:
    """One feed-forward network: ``down @ (silu(gate @ x) * (up @ x))``, all float32."""

    gate: Floats  # [F, H]
    up: Floats  # [F, H]
    down: Floats  # [H, F]

    @classmethod
    def numbered(cls, expert: int, hidden: int, inner: int, seed: int) -> Expert:
        """Expert ``expert``: the same weights wherever it is made."""
        inward = vectors(EXPERT, 2 * expert, (2, inner, hidden), seed) / np.float32(hidden**0.5)
        outward = vectors(EXPERT, 2 * expert + 1, (hidden, inner), seed) / np.float32(inner**0.5)
        return cls(inward[0], inward[1], outward)

    def __call__(self, x: Floats) -> Floats:
        """x [N, H] float32 → [N, H] float32."""
        gate = x @ self.gate.T
        silu = gate / (np.float32(1) + np.exp(-gate))
        out: Floats = (silu * (x @ self.up.T)) @ self.down.T
        return out


def run_experts(recv: Received, experts: Sequence[Expert], cfg: MoeConfig) -> npt.NDArray[Any]:
    """``y`` for ``combine``: every local expert over its rows of ``recv.x``.

    Same shape and row order as ``recv.x``, in ``cfg.combine_dtype``. In the ``rank`` layout a row
    is the weighted float32 sum over this rank's experts; in the others combine applies weights.
    """
    dtype = numpy_dtype(cfg.combine_dtype)
    if cfg.layout == "rank":
        return _sum_per_row(recv, experts, cfg).astype(dtype)
    y = np.zeros(recv.x.shape, dtype)
    for local, expert in enumerate(experts):
        rows = _rows_of(recv, local, cfg)
        y[rows] = expert(_wide(recv, rows, cfg))
    return y


def _rows_of(recv: Received, local: int, cfg: MoeConfig) -> Any:
    """Index of one expert's rows in the ``batched`` or ``grouped`` layout."""
    count = int(recv.counts[local])
    if cfg.layout == "batched":
        return local, slice(0, count)
    assert recv.offsets is not None, "grouped rows come with offsets"
    start = int(recv.offsets[local])
    return slice(start, start + count)


def _sum_per_row(recv: Received, experts: Sequence[Expert], cfg: MoeConfig) -> Floats:
    sums = np.zeros(recv.x.shape, np.float32)
    assert recv.topk_idx is not None, "rank rows come with their routing"
    assert recv.topk_weights is not None, "the layer gave its weights to dispatch"
    used = int(recv.num_rows[0])
    for local, expert in enumerate(experts):
        rows, slots = np.nonzero(recv.topk_idx[:used] == local)
        weights = recv.topk_weights[rows, slots, None]
        sums[rows] += weights * expert(_wide(recv, rows, cfg))
    return sums


def _wide(recv: Received, rows: Any, cfg: MoeConfig) -> Floats:
    scales = None if recv.x_scale is None else recv.x_scale[rows]
    return dequantize(recv.x[rows], scales, cfg.scale_block)
