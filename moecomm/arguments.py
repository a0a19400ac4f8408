"""Filling the launch arguments of a stage from checked inputs."""

from __future__ import annotations

from moecomm.arrays import ArrayView
from moecomm.checks import DispatchInputs
from moecomm.kernels.args import Args
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime


def base(layout: Layout, run: Runtime, slot: int, timeout_ns: int) -> Args:
    """What every stage needs."""
    return Args(
        local=run.local,
        symmetric=run.symmetric,
        status=run.status_address,
        rank=layout.rank,
        slot=slot,
        num_local=layout.num_local_experts,
        first_expert=layout.expert_range(layout.rank).start,
        timeout_ns=timeout_ns,
    )


def set_dispatch(args: Args, given: DispatchInputs) -> None:
    set_rows(args, "x", given.x)
    _set_strided(args, "topk_idx", given.topk_idx)
    args.topk_idx_bytes = 8 if given.topk_idx.dtype == "int64" else 4
    if given.topk_weights is not None:
        _set_strided(args, "topk_weights", given.topk_weights)
    if given.x_scale is not None:
        args.x_scale = given.x_scale.pointer
        args.x_scale_row_stride, args.x_scale_col_stride = given.x_scale.strides_bytes
    if given.num_tokens is not None:
        args.num_tokens = given.num_tokens.pointer
    args.max_rows = given.num_rows


def set_combine(args: Args, weights: ArrayView | None, out: ArrayView, accumulate: bool) -> None:
    """``weights`` ``None``: those kept by dispatch, or none at all."""
    if weights is not None:
        _set_strided(args, "topk_weights", weights)
    set_rows(args, "out", out)
    args.accumulate = accumulate


def set_rows(args: Args, name: str, found: ArrayView) -> None:
    """A matrix of rows, and whether each starts on a 16-byte boundary."""
    _set_strided(args, name, found)
    aligned = found.pointer % 16 == 0 and found.strides_bytes[0] % 16 == 0
    setattr(args, f"{name}_aligned", aligned)


def _set_strided(args: Args, name: str, found: ArrayView) -> None:
    setattr(args, name, found.pointer)
    setattr(args, f"{name}_stride", found.strides_bytes[0])
