"""Views of one slot's received rows, as arrays of the caller's kind."""

from __future__ import annotations

import math
from typing import Any

from moecomm import arrays
from moecomm.dtypes import itemsize
from moecomm.handle import Handle, Received
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime


class ReceivedViews:
    """Makes ``Received`` over the workspace; nothing is copied and nothing synchronises.

    torch tensors on a GPU are made once per slot, since making them costs more than a launch;
    each call then hands out the integer ones again and new aliases of the others.
    """

    def __init__(self, layout: Layout, run: Runtime) -> None:
        self._layout = layout
        self._run = run
        self._made: dict[tuple[int, bool], tuple[Any, ...]] = {}

    def of(self, handle: Handle) -> Received:
        """What ``handle`` received."""
        if handle.kind != "torch" or self._run.synchronous:
            return Received(handle=handle, **self._make(handle))
        key = handle.slot, handle.weights_given
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = tuple(self._make(handle).values())
        x, x_scale, counts, offsets, num_rows, src_rank, src_token, weights, topk_idx = made
        return Received(
            handle,
            x.detach(),
            None if x_scale is None else x_scale.detach(),
            counts,
            offsets,
            num_rows,
            src_rank,
            src_token,
            None if weights is None else weights.detach(),
            topk_idx,
        )

    def clear(self) -> None:
        """Let go of the workspace."""
        self._made.clear()

    def _make(self, handle: Handle) -> dict[str, Any]:
        """Every field of ``Received`` but the handle, in their order."""
        layout, run = self._layout, self._run
        cfg = layout.cfg
        rows = layout.recv_shape[:-1]
        num_local = layout.num_local_experts
        is_rank = cfg.layout == "rank"

        def array(region: str, shape: tuple[int, ...], dtype: str, stride: int) -> Any:
            """One slot of a region whose slots are ``stride`` bytes apart."""
            pointer = run.local + layout.local[region].offset + handle.slot * stride
            return arrays.wrap(pointer, shape, dtype, handle.kind, run.owner, run.device)

        def per_row(region: str, dtype: str, *inner: int) -> Any:
            stride = layout.slot_rows * math.prod(inner) * itemsize(dtype)
            return array(region, (*rows, *inner), dtype, stride)

        weights = offsets = None
        if is_rank:
            weights = per_row("row_weight", "float32", cfg.top_k)
        else:
            offsets = array(
                "offsets", (num_local + 1,), "int32", 4 * (layout.max_local_experts + 1)
            )
            if handle.weights_given:
                weights = per_row("row_weight", "float32")
        return {
            "x": array("x", layout.recv_shape, cfg.recv_dtype, layout.recv_slot_bytes),
            "x_scale": per_row("x_scale", "float32", cfg.recv_scales) if cfg.recv_scales else None,
            "counts": array("counts", (num_local,), "int32", 4 * layout.max_local_experts),
            "offsets": offsets,
            "num_rows": array("num_rows", (1,), "int32", 4),
            "src_rank": per_row("src_rank", "int32"),
            "src_token": per_row("src_token", "int32"),
            "topk_weights": weights,
            "topk_idx": per_row("row_expert", "int32", cfg.top_k) if is_rank else None,
        }
