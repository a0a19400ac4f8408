"""Views of one slot's received rows, as arrays of the caller's kind."""

from __future__ import annotations

import math
from typing import Any

from moecomm import arrays
from moecomm.dtypes import itemsize
from moecomm.handle import Handle, Received
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime


def received_views(layout: Layout, handle: Handle, run: Runtime) -> Received:
    """``Received`` over the workspace; nothing is copied and nothing synchronises."""
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

    weights = None
    if is_rank:
        weights = per_row("row_weight", "float32", cfg.top_k)
    elif handle.weights_given:
        weights = per_row("row_weight", "float32")
    return Received(
        handle=handle,
        x=array("x", layout.recv_shape, cfg.dispatch_dtype, layout.recv_slot_bytes),
        x_scale=per_row("x_scale", "float32", cfg.num_scales) if cfg.num_scales else None,
        counts=array("counts", (num_local,), "int32", 4 * layout.max_local_experts),
        offsets=None
        if is_rank
        else array("offsets", (num_local + 1,), "int32", 4 * (layout.max_local_experts + 1)),
        num_rows=array("num_rows", (1,), "int32", 4),
        src_rank=per_row("src_rank", "int32"),
        src_token=per_row("src_token", "int32"),
        topk_weights=weights,
        topk_idx=per_row("row_expert", "int32", cfg.top_k) if is_rank else None,
    )
