"""The launch arguments of a stage from checked inputs: numbers in the order of ``Args``."""

from __future__ import annotations

from moecomm.arrays import ArrayView
from moecomm.checks_dispatch import DispatchInputs
from moecomm.kernels.args import ArgBlock, Args
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime


def blocks(layout: Layout, run: Runtime) -> list[ArgBlock]:
    """One block a slot, filled with what never changes."""
    return [
        ArgBlock(
            Args(
                local=run.local,
                symmetric=run.symmetric,
                status=run.status_address,
                rank=layout.rank,
                slot=slot,
                num_local=layout.num_local_experts,
                timeout_ns=int(layout.cfg.timeout_s * 1e9),
                remote_flags=run.remote_flags,
                remote_bulk=run.remote_bulk,
                network_bulk=run.network_bulk,
            )
        )
        for slot in range(layout.cfg.in_flight)
    ]


def dispatch_words(given: DispatchInputs) -> tuple[int, ...]:
    """``DISPATCH_FIELDS``."""
    scale = given.x_scale
    return (
        *row_words(given.x),
        *((scale.pointer, *scale.strides_bytes) if scale is not None else (0, 0, 0)),
        given.topk_idx.pointer,
        given.topk_idx.strides_bytes[0],
        8 if given.topk_idx.dtype == "int64" else 4,
        *weight_words(given.topk_weights),
        given.num_tokens.pointer if given.num_tokens is not None else 0,
        given.num_rows,
    )


def row_words(found: ArrayView) -> tuple[int, int, int]:
    """A matrix of rows: address, bytes from row to row, whether all start on 16 bytes."""
    stride = found.strides_bytes[0]
    return found.pointer, stride, found.pointer % 16 == 0 and stride % 16 == 0


def weight_words(weights: ArrayView | None) -> tuple[int, int]:
    """``WEIGHT_FIELDS``. ``None``: those kept by dispatch, or none at all."""
    return (0, 0) if weights is None else (weights.pointer, weights.strides_bytes[0])
