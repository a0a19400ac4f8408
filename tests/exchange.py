"""One exchange as a test case: inputs of all ranks, what the reference says, and the comparison.

A case is made from its numbers alone, so every rank of a test can make the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from payload import assert_same_bits, global_ids, payload, payload_fp8, random_topk, random_weights

import moecomm as mc
from moecomm.dtypes import numpy_dtype
from moecomm.reference import Received as Expected

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Lists count ranks."""

    cfg: mc.MoeConfig
    num_ranks: int
    xs: list[Array]
    idxs: list[Array]
    weights: list[Array]
    x_scales: list[Array] | None
    recv: list[Expected]
    ys: list[Array]
    outs: list[Array]

    @property
    def weights_at_dispatch(self) -> bool:
        return self.cfg.weights_travel or self.cfg.layout == "rank"


def make_case(
    cfg: mc.MoeConfig,
    num_ranks: int,
    seed: int = 0,
    *,
    tokens: Sequence[int] | None = None,
    input_dtype: str | None = None,
    dropped: float = 0.1,
    repeated: float = 0.1,
    skew: float = 0.0,
    idxs: Sequence[Array] | None = None,
) -> Case:
    """``tokens`` counts source groups (default: any number up to the cap); ``input_dtype`` is
    ``x``'s; ``idxs`` (one a group) replaces the random routing."""
    rng = np.random.default_rng(seed)
    groups = num_ranks // cfg.replicas
    if tokens is None:
        tokens = [len(i) for i in idxs] if idxs is not None else None
    if tokens is None:
        tokens = rng.integers(0, cfg.max_tokens + 1, groups).tolist()
    if idxs is None:
        idxs = [_routing(rng, count, cfg, dropped, repeated, skew) for count in tokens]
    xs, scales = [], []
    for group, count in enumerate(tokens):
        ids = global_ids(group, count, cfg.max_tokens)
        xs.append(_rows(ids, cfg, input_dtype or cfg.dispatch_dtype))
        scales.append((1 + ids[:, None] % 7 + np.arange(cfg.num_scales) % 5).astype(np.float32))
    weights = [random_weights(rng, i) for i in idxs]

    def per_rank(values: Sequence[Array]) -> list[Array]:
        return [values[rank // cfg.replicas] for rank in range(num_ranks)]

    given_scales = cfg.num_scales > 0 and xs[0].dtype == numpy_dtype("float8_e4m3fn")
    xs, idxs, weights = per_rank(xs), per_rank(idxs), per_rank(weights)
    x_scales = per_rank(scales) if given_scales else None
    travel = cfg.weights_travel or cfg.layout == "rank"
    recv = mc.reference.dispatch(cfg, num_ranks, xs, idxs, weights if travel else None, x_scales)
    ys = [_expert_output(cfg, num_ranks, rank, recv[rank]) for rank in range(num_ranks)]
    outs = mc.reference.combine(cfg, num_ranks, ys, idxs, None if cfg.layout == "rank" else weights)
    return Case(cfg, num_ranks, xs, idxs, weights, x_scales, recv, ys, outs)


def _routing(
    rng: np.random.Generator,
    tokens: int,
    cfg: mc.MoeConfig,
    dropped: float,
    repeated: float,
    skew: float,
) -> Array:
    """Random experts; shares of tokens that name one twice, and that all name the same."""
    idx = random_topk(rng, tokens, cfg.num_experts, cfg.top_k, dropped=dropped)
    twice = rng.random(tokens) < repeated
    idx[twice, -1] = idx[twice, 0]
    idx[rng.random(tokens) < skew] = np.arange(cfg.top_k)
    return idx


def run_case(comm: mc.MoeComm, case: Case) -> None:
    """Dispatch, compare bit for bit; combine, compare bit for bit."""
    handle = send(comm, case)
    recv = comm.dispatch_recv(handle)
    compare_received(case, comm.group.rank, recv)
    finish(comm, case, recv)


def send(comm: mc.MoeComm, case: Case) -> mc.Handle:
    rank = comm.group.rank
    return comm.dispatch_send(
        case.xs[rank],
        case.idxs[rank],
        case.weights[rank] if case.weights_at_dispatch else None,
        None if case.x_scales is None else case.x_scales[rank],
    )


def finish(comm: mc.MoeComm, case: Case, recv: mc.Received) -> None:
    rank = comm.group.rank
    comm.combine_send(case.ys[rank], recv.handle)
    out = comm.combine_recv(recv.handle, None if case.weights_at_dispatch else case.weights[rank])
    assert_same_bits(np.asarray(out), case.outs[rank], f"rank {rank}: out")


def compare_received(case: Case, rank: int, recv: mc.Received) -> None:
    """Every array, on the rows that mean something."""
    expected = case.recv[rank]
    assert_same_bits(recv.counts, expected.counts, f"rank {rank}: counts")
    assert_same_bits(recv.num_rows, expected.num_rows, f"rank {rank}: num_rows")
    if expected.offsets is not None:
        assert_same_bits(recv.offsets, expected.offsets, f"rank {rank}: offsets")
    used = used_rows(case, rank)
    for name in ("x", "x_scale", "src_rank", "src_token", "topk_weights", "topk_idx"):
        want, have = getattr(expected, name), getattr(recv, name)
        assert (want is None) == (have is None), f"rank {rank}: {name}"
        if want is not None:
            assert have.shape == want.shape, f"rank {rank}: {name} has shape {have.shape}"
            assert_same_bits(have[used], want[used], f"rank {rank}: {name}")


def used_rows(case: Case, rank: int) -> Array:
    """True for rows with defined contents: ``[L, C]`` or ``[N]``."""
    expected = case.recv[rank]
    if case.cfg.layout == "batched":
        return np.arange(expected.x.shape[1]) < expected.counts[:, None]
    return np.arange(len(expected.x)) < expected.num_rows[0]


def _rows(ids: Array, cfg: mc.MoeConfig, dtype: str) -> Array:
    if dtype == "float8_e4m3fn":
        return payload_fp8(ids, cfg.hidden)
    rows = payload(ids, cfg.hidden, dtype)
    cast = dtype != cfg.dispatch_dtype or cfg.coded is not None
    return rows - rows.dtype.type(100) if cast else rows


def _values(cfg: mc.MoeConfig, recv: Expected) -> Array:
    """Received rows as float32."""
    if cfg.decode_to is not None:
        return recv.x.astype(np.float32)
    if cfg.coded is not None:
        return mc.reference.decode(cfg.coded, recv.x, recv.x_scale)
    return mc.reference.dequantize(recv.x, recv.x_scale, cfg.scale_block)


def _expert_output(cfg: mc.MoeConfig, num_ranks: int, rank: int, recv: Expected) -> Array:
    """Expert e gives x * (e + 1); rows that nobody may read are NaN."""
    x = _values(cfg, recv)
    y = np.full(recv.x.shape, np.nan, np.float32)
    first = mc.reference.expert_range(cfg.num_experts, num_ranks, rank).start
    if cfg.layout == "rank":
        for row in range(int(recv.num_rows[0])):
            factor = sum(
                w * (first + e + 1)
                for e, w in zip(recv.topk_idx[row], recv.topk_weights[row], strict=True)
                if e >= 0
            )
            y[row] = x[row] * np.float32(factor)
    else:
        for expert, count in enumerate(recv.counts):
            rows = y[expert] if cfg.layout == "batched" else y[recv.offsets[expert] :]
            source = x[expert] if cfg.layout == "batched" else x[recv.offsets[expert] :]
            rows[:count] = source[:count] * np.float32(first + expert + 1)
    return y.astype(numpy_dtype(cfg.combine_dtype))
