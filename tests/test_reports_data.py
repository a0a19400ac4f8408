"""Shapes, strides, dtypes and rounding that went wrong elsewhere; see docs/reports.md, rows B."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from exchange import Case, compare_received, make_case, run_case
from payload import assert_same_bits
from schedules import dispatch_arguments
from simulated import exchange, run_cases
from tensors import received_as_numpy, to_numpy, to_torch
from threads import run_threads

import moecomm as mc
from moecomm.dtypes import numpy_dtype
from moecomm.emulator import simulate

pytestmark = pytest.mark.usefixtures("poisoned")

FP8: dict[str, Any] = {"dispatch_dtype": "float8_e4m3fn", "scale_block": 128}
Array = np.ndarray[Any, Any]


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens": 6, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


@pytest.mark.parametrize("wire", ["auto", "flags"])
@pytest.mark.parametrize(
    "hidden", [1536, 2048, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 1, 3, 200]
)
def test_b01_any_hidden_size_with_little_padding_on_the_wire(hidden: int, wire: Any) -> None:
    """A record is the row and the routing: to a line of memory each, or, each rounded up to 16
    bytes, 128 bytes for every 120. Nothing else travels."""
    cfg = config(hidden=hidden, max_tokens=3, wire=wire)
    layout = mc.Layout(cfg, 2, 0)
    row = -(-2 * hidden // 16) * 16
    if wire == "flags" or hidden % 8:
        record = 128 + -(-row // 128) * 128  # two slots' routing takes 40 bytes
        assert (layout.record_bytes, layout.combine_stride) == (record, row)
    else:
        lines = [-(-nbytes // 120) * 128 for nbytes in (16 + 12 * cfg.top_k + 8 + row, row)]
        assert [layout.record_bytes, layout.combine_stride] == lines
    case = make_case(cfg, 2, tokens=(3, 2), dropped=0.0)
    stats = run_threads(_stats, 2, [case])
    assert sum(stats[0].dispatch_tokens) <= 6
    assert sum(stats[0].dispatch_bytes) == sum(stats[0].dispatch_tokens) * layout.record_bytes
    assert case.outs[0].shape == (3, hidden)


def _stats(group: mc.Group, cases: list[Case]) -> mc.Stats:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        run_case(comm, cases[0])
        group.barrier(20)
        return comm.stats()


def test_b01_rows_too_wide_for_shared_memory_go_without_lines() -> None:
    """Lines are made in shared memory. The wire is then ``flags``; asked for, it is an error."""
    cfg = config(hidden=100_000, max_tokens=2)
    assert not mc.Layout(cfg, 2, 0).lines
    assert mc.Layout(config(hidden=40_000, max_tokens=2), 2, 0).lines
    run_threads(run_cases, 2, [make_case(cfg, 2, tokens=(1, 2))])
    with pytest.raises(mc.ConfigError, match="wire='lines': .* at most .* hidden=100000 makes"):
        mc.Layout(config(hidden=100_000, wire="lines"), 2, 0).record_bytes  # noqa: B018


@pytest.mark.parametrize("hidden", [200, 2880])
@pytest.mark.parametrize(
    ("fields", "input_dtype"),
    [({}, None), (FP8, None), (FP8, "bfloat16"), ({**FP8, "layout": "rank"}, "float32")],
    ids=["bf16", "fp8-given", "fp8-cast", "fp8-cast-rank"],
)
def test_b02_hidden_sizes_that_no_block_divides(
    hidden: int, fields: dict[str, Any], input_dtype: str | None
) -> None:
    """The last, partial block has a scale of its own."""
    (case,) = exchange(config(hidden=hidden, **fields), 2, tokens=(3, 2), input_dtype=input_dtype)
    if fields:
        assert case.recv[0].x_scale is not None
        assert case.recv[0].x_scale.shape[-1] == -(-hidden // 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_b04_the_dtype_is_settled_in_the_configuration(dtype: str) -> None:
    """Exact in its own, and a TypeError that names both for any other, before anything is sent."""
    cfg = config(dispatch_dtype=dtype, combine_dtype=dtype)
    run_threads(run_cases, 2, [make_case(cfg, 2)])
    for other in {"bfloat16", "float16", "float32"} - {dtype}:
        run_threads(_other_dtype, 1, cfg, other)


def _other_dtype(group: mc.Group, cfg: mc.MoeConfig, other: str) -> None:
    x, idx = np.ones((2, 64), numpy_dtype(other)), np.zeros((2, 2), np.int32)
    with mc.MoeComm(cfg, group) as comm:
        with pytest.raises(TypeError, match=f"x has dtype {other}: must be {cfg.dispatch_dtype}"):
            comm.dispatch(x, idx)
        run_case(comm, make_case(cfg, 1))


# ---- strides ----------------------------------------------------------------------------------


def spread(array: Array, how: str) -> Array:
    """The same values, lying differently."""
    rows, columns = array.shape
    if how == "wide":  # the left part of a wider matrix
        wide = np.full((rows, 2 * columns), 77, array.dtype)
        wide[:, :columns] = array
        return wide[:, :columns]
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "every second column":
        wide = np.full((rows, 2 * columns), 77, array.dtype)
        wide[:, ::2] = array
        return wide[:, ::2]
    if how == "backwards":
        return np.ascontiguousarray(array[::-1])[::-1]
    shifted = np.full(array.size + 1, 77, array.dtype)  # on no 16-byte boundary
    shifted[1:] = array.ravel()
    return shifted[1:].reshape(array.shape)


HOWS = ["wide", "transposed", "every second column", "backwards", "shifted"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_b05_arrays_that_are_views_of_others(how: str, kind: str) -> None:
    """Rows, routing, weights and outputs; a router's top-k is often a view. torch has no negative
    strides."""
    if kind == "torch" and how == "backwards":
        return
    for fields, input_dtype in (({"hidden": 40}, None), ({**FP8, "hidden": 40}, "float16")):
        case = make_case(config(**fields), 2, input_dtype=input_dtype, tokens=(6, 3))
        run_threads(_spread, 2, case, how, kind)


def _spread(group: mc.Group, case: Case, how: str, kind: str) -> None:
    rank = group.rank
    experts, rows, hidden = case.ys[rank].shape

    def as_given(array: Array) -> Any:
        found = spread(array, how)
        if kind == "numpy":
            return found
        base = found if found.base is None else found.base
        if found.ndim == 2 and how in ("wide", "every second column"):
            tensor = to_torch(base)
            return tensor[:, : array.shape[1]] if how == "wide" else tensor[:, ::2]
        return to_torch(array.T.copy()).T if how == "transposed" else to_torch(array)

    with mc.MoeComm(case.cfg, group) as comm:
        x, idx, weights = (
            as_given(a) for a in (case.xs[rank], case.idxs[rank], case.weights[rank])
        )
        recv = comm.dispatch(x, idx, weights)
        compare_received(
            dataclasses.replace(case, recv=_with_weights(case)), rank, received_as_numpy(recv)
        )
        y = as_given(case.ys[rank].reshape(experts * rows, hidden)).reshape(experts, rows, hidden)
        out = comm.combine(y, recv.handle, weights)
        assert_same_bits(to_numpy(out), case.outs[rank], "out")
        group.barrier(20)


def _with_weights(case: Case) -> list[Any]:
    return mc.reference.dispatch(case.cfg, 2, case.xs, case.idxs, case.weights, case.x_scales)


def test_b05_weights_of_stride_zero() -> None:
    """One weight for all slots, expanded."""
    case = make_case(config(), 1, tokens=(5,), dropped=0.0)
    weights = torch.full((5, 1), 0.25).expand(5, 2)
    assert weights.stride() == (1, 0)
    outs = mc.reference.combine(case.cfg, 1, case.ys, case.idxs, [weights.numpy()])
    run_threads(_expanded, 1, dataclasses.replace(case, outs=outs), weights)


def _expanded(group: mc.Group, case: Case, weights: Any) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(to_torch(case.xs[0]), to_torch(case.idxs[0]), weights)
        out = comm.combine(to_torch(case.ys[0]), recv.handle)
        assert_same_bits(to_numpy(out), case.outs[0], "out")


# ---- fp8 and its scales -------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [128, 1024, 7168])
@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_b06_scales_of_either_majorness(hidden: int, layout: str) -> None:
    """The receiver gets the same rows, and scales that are always row-major."""
    case = make_case(config(hidden=hidden, layout=layout, max_tokens=3, **FP8), 2, tokens=(3, 2))
    assert case.x_scales is not None
    turned = [np.ascontiguousarray(s.T).T for s in case.x_scales]
    assert hidden == 128 or not turned[0].flags.c_contiguous
    simulate(run_cases, 2, [case, dataclasses.replace(case, x_scales=turned)], seed=1)
    run_threads(_row_major, 2, case)


def _row_major(group: mc.Group, case: Case) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(*dispatch_arguments(case, group.rank))
        assert recv.x_scale.flags.c_contiguous
        assert recv.x_scale.shape == (*recv.x.shape[:-1], case.cfg.num_scales)
        group.barrier(20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("pow2", [True, False])
def test_b07_scales_that_are_powers_of_two(dtype: str, pow2: bool) -> None:
    """The smallest power of two that is at least amax / 448; errors within half a step of e4m3."""
    cfg = config(hidden=1024, scale_pow2=pow2, **FP8)
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 3, (6, 1024)) * 2.0 ** rng.integers(-6, 6, (6, 1))
    rows[0, :128] = 0  # a block of zeros
    rows[1, :128] = np.linspace(-448, 448, 128)  # amax / 448 is a power of two already
    rows[2, 128:256] = np.linspace(-1, 1, 128) * 448 / 4
    x = rows.astype(numpy_dtype(dtype))
    (result,) = run_threads(_cast, 1, cfg, x)
    q, scale = result
    blocks = x.astype(np.float64).reshape(6, 8, 128)
    largest = np.abs(blocks).max(axis=2)
    ideal = np.maximum(largest, 1e-30) / 448
    if pow2:
        assert (np.frexp(scale)[0] == 0.5).all()
        assert (scale.astype(np.float64) >= ideal * (1 - 1e-7)).all()
        assert (scale.astype(np.float64) < 2 * ideal * (1 + 1e-7)).all()
        assert scale[1, 0] == 1
        assert scale[2, 1] == 0.25
    else:
        np.testing.assert_allclose(scale, ideal, rtol=1e-6)
    back = q.astype(np.float64).reshape(6, 8, 128) * scale[..., None]
    step = np.maximum(np.abs(blocks) / 8, scale[..., None] * 2.0**-9)  # 3 bits after the point
    assert (np.abs(back - blocks) <= step / 2 * (1 + 1e-6)).all()


def _cast(group: mc.Group, cfg: mc.MoeConfig, x: Array) -> tuple[Array, Array]:
    with mc.MoeComm(cfg, group) as comm:
        recv = comm.dispatch(x, np.tile(np.array([0, -1], np.int32), (len(x), 1)))
        q, scales = mc.reference.quantize(x, 128, pow2=cfg.scale_pow2)
        assert_same_bits(recv.x[0, : len(x)], q, "x")
        assert_same_bits(recv.x_scale[0, : len(x)], scales, "x_scale")
        return recv.x[0, : len(x)].copy(), recv.x_scale[0, : len(x)].copy()


def test_b09_bf16_right_after_fp8_on_one_group() -> None:
    """Without scales nothing looks at them, whatever the communicator before had."""
    run_threads(_one_after_the_other, 2)


def _one_after_the_other(group: mc.Group) -> None:
    plain, scaled = config(), config(**FP8)
    with mc.MoeComm(scaled, group) as first, mc.MoeComm(plain, group) as second:
        for seed in range(4):
            run_case(first, make_case(scaled, 2, seed, input_dtype=(None, "bfloat16")[seed % 2]))
            run_case(second, make_case(plain, 2, seed))
        group.barrier(20)


# ---- sums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"reduce": "sender"}, {"layout": "grouped"}])
def test_b10_sums_are_rounded_once(fields: dict[str, Any]) -> None:
    """256 + 7 ones is 263 in float32, 264 in bfloat16; a bfloat16 sum would stay at 256."""
    cfg = config(num_experts=8, top_k=8, **fields)
    assert run_threads(_sum, 1, cfg) == [264.0]


def _sum(group: mc.Group, cfg: mc.MoeConfig) -> float:
    bf16 = numpy_dtype("bfloat16")
    x, idx = np.ones((1, 64), bf16), np.arange(8, dtype=np.int32)[None]
    with mc.MoeComm(cfg, group) as comm:
        recv = comm.dispatch(x, idx, np.ones((1, 8), np.float32))
        y = np.zeros(comm.layout.recv_shape, bf16)
        first = y.reshape(8, -1, 64)[:, 0] if cfg.layout == "batched" else y[:8]
        first[:] = np.array([256, 1, 1, 1, 1, 1, 1, 1], bf16)[:, None]
        out = comm.combine(y, recv.handle)
    assert (out == out[0, 0]).all()
    return float(out[0, 0])


def test_b14_every_round_at_the_top_token_count_is_exact() -> None:
    """T is the cap, integer values, compared bit for bit; smaller than on a GPU, and once wide."""
    cfg = config(num_experts=16, top_k=8, hidden=64, max_tokens=32)
    run_threads(_rounds, 2, [make_case(cfg, 2, seed, tokens=(32, 32)) for seed in range(4)], 25)
    wide = config(num_experts=16, top_k=8, hidden=7168, max_tokens=16)
    run_threads(_rounds, 2, [make_case(wide, 2, 0, tokens=(16, 16))], 2)


def _rounds(group: mc.Group, cases: list[Case], rounds: int) -> None:
    run_cases(group, cases * rounds)
