"""Dispatch: every rank's receive area, filled row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecomm.codecs.definition import Codec
from moecomm.codecs.plain import decode_rows
from moecomm.config import MoeConfig
from moecomm.dtypes import numpy_dtype
from moecomm.errors import ConfigError
from moecomm.layout import Layout
from moecomm.reference.inputs import check_shape, route, wire
from moecomm.reference.routing import Routing

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank receives. Unused rows: 0 in ``x``, ``x_scale`` and ``topk_weights``, -1 in
    ``src_rank``, ``src_token`` and ``topk_idx``.

    Attributes:
        x: ``batched`` ``[L, C, H]``, else ``[N, H]``; of ``recv_dtype``.
        x_scale: float32, S in place of H; ``None`` without scales.
        counts: ``[L]`` int32, tokens of each local expert (pad rows not counted).
        offsets: ``[L+1]`` int32, row of each expert's first token; ``None`` in ``rank`` layout.
        num_rows: ``[1]`` int32, rows in use, pad rows counted.
        topk_idx: ``rank`` layout: ``[N, K]`` int32, local expert or -1; else ``None``.
        topk_weights: float32, ``[L, C]``, ``[N]`` or (``rank``) ``[N, K]``; ``None`` if none given.
        src_rank: int32, source group of each row; ``[L, C]`` or ``[N]``.
        src_token: int32, token number there; same shape.
    """

    x: Array
    x_scale: Array | None
    counts: Array
    offsets: Array | None
    num_rows: Array
    topk_idx: Array | None
    topk_weights: Array | None
    src_rank: Array
    src_token: Array


def dispatch(
    cfg: MoeConfig,
    num_ranks: int,
    xs: Sequence[Array],
    topk_idxs: Sequence[Array],
    topk_weights: Sequence[Array] | None = None,
    x_scales: Sequence[Array] | None = None,
) -> list[Received]:
    """Send every token to its experts.

    Args:
        xs: R of ``[T, H]``, T of each rank's own; replicas hold the same.
        topk_idxs: R of ``[T, K]`` int32 or int64, -1 = dropped.
        topk_weights: R of ``[T, K]`` float32, bfloat16 or float16.
        x_scales: R of ``[T, S]`` float32, for fp8 ``xs`` with ``scale_block``.

    Raises:
        ConfigError: a shape, dtype or expert number breaks its rule; replicas differ.
        Overflow: ``max_recv_tokens`` is too small somewhere; the same for every rank.
    """
    layouts = [Layout(cfg, num_ranks, rank) for rank in range(num_ranks)]
    routing = route(cfg, num_ranks, topk_idxs, topk_weights)
    if cfg.weights_travel and topk_weights is None:
        raise ConfigError("topk_weights=None: reduce='sender' needs the weights at dispatch")
    rows, scales = wire(cfg, num_ranks, xs, x_scales)
    for group, tokens in enumerate(routing.tokens):
        check_shape("x", group, rows[group], (len(tokens), cfg.hidden))
        if scales is not None:
            check_shape("x_scale", group, scales[group], (len(tokens), cfg.num_scales))
    if cfg.coded is not None and cfg.decode_to is not None:
        rows, scales = _decoded(cfg.coded, rows, scales, cfg.decode_to), None
    return [
        _receive(routing, layouts[rank], rows, scales, weighted=topk_weights is not None)
        for rank in range(num_ranks)
    ]


def _decoded(
    codec: Codec, rows: list[Array], scales: list[Array] | None, dtype: str
) -> list[Array]:
    """What arrives where rows are decoded."""
    given: Sequence[Array | None] = [None] * len(rows) if scales is None else scales
    return [decode_rows(codec, q, scale, dtype) for q, scale in zip(rows, given, strict=True)]


def _receive(
    routing: Routing,
    layout: Layout,
    rows: list[Array],
    scales: list[Array] | None,
    *,
    weighted: bool,
) -> Received:
    """Fill one rank's receive area, row by row."""
    cfg, rank = layout.cfg, layout.rank
    by_rank = cfg.layout == "rank"
    num, slots_shape = layout.recv_rows, (cfg.top_k,) if by_rank else ()
    x = np.zeros((num, cfg.hidden), numpy_dtype(cfg.recv_dtype))
    x_scale = np.zeros((num, cfg.num_scales), np.float32)
    weights = np.zeros((num, *slots_shape), np.float32)
    idx = np.full((num, cfg.top_k), -1, np.int32)
    src_rank, src_token = np.full(num, -1, np.int32), np.full(num, -1, np.int32)
    for row, token, slots in routing.placed(rank, layout.expert_capacity):
        x[row] = rows[token.group][token.index]
        if scales is not None:
            x_scale[row] = scales[token.group][token.index]
        src_rank[row], src_token[row] = token.group, token.index
        for slot in slots:
            if by_rank:
                idx[row, slot.place] = slot.expert - routing.experts[rank].start
            if slot.weight is not None:
                weights[(row, slot.place) if by_rank else row] = slot.weight
    lead = layout.recv_shape[:-1]
    offsets = None if by_rank else routing.offsets(rank, layout.expert_capacity)
    return Received(
        x=x.reshape(*lead, cfg.hidden),
        x_scale=x_scale.reshape(*lead, cfg.num_scales) if scales is not None else None,
        counts=np.array(routing.counts(rank), np.int32),
        offsets=None if offsets is None else np.array(offsets, np.int32),
        num_rows=np.array([routing.num_rows(rank)], np.int32),
        topk_idx=idx if by_rank else None,
        topk_weights=weights.reshape(*lead, *slots_shape) if weighted else None,
        src_rank=src_rank.reshape(lead),
        src_token=src_token.reshape(lead),
    )
