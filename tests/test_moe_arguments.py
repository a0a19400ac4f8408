"""The optional arguments of the halves, and what ``Received`` offers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exchange import Case, compare_received, make_case, run_case, used_rows
from payload import assert_same_bits
from schedules import dispatch_arguments
from tensors import to_numpy, to_torch
from threads import run_threads

import moecomm as mc
from moecomm.dtypes import numpy_dtype

pytestmark = pytest.mark.usefixtures("poisoned")

BASE: dict[str, Any] = {
    "num_experts": 7, "top_k": 3, "hidden": 40, "max_tokens": 9, "timeout_s": 20.0
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "sender": {"reduce": "sender"},
    "grouped": {"layout": "grouped", "expert_alignment": 4},
    "rank": {"layout": "rank"},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
R = 3


def config(layout: str, **fields: Any) -> mc.MoeConfig:
    return mc.MoeConfig(**{**BASE, **LAYOUTS[layout], **fields})


def combine(comm: mc.MoeComm, case: Case, handle: mc.Handle, **arguments: Any) -> Any:
    rank = comm.group.rank
    weights = None if case.weights_at_dispatch else case.weights[rank]
    return comm.combine(case.ys[rank], handle, weights, **arguments)


# ---- out, accumulate ------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_out_is_written_in_place_and_nothing_beside_it(layout: str, dtype: str) -> None:
    """Rows in a wider matrix, at a place that is no multiple of 16 bytes."""
    cfg = config(layout, combine_dtype=dtype)
    run_threads(_out, R, make_case(cfg, R))


def _out(group: mc.Group, case: Case) -> None:
    tokens, hidden = case.outs[group.rank].shape
    with mc.MoeComm(case.cfg, group) as comm:
        for left, right in ((0, 0), (8, 24), (3, 2)):
            wide = np.full((tokens, left + hidden + right), 7, numpy_dtype(case.cfg.combine_dtype))
            out = wide[:, left : left + hidden]
            recv = comm.dispatch(*dispatch_arguments(case, group.rank))
            assert combine(comm, case, recv.handle, out=out) is out
            assert_same_bits(out, case.outs[group.rank], "out")
            assert (wide[:, :left] == 7).all()
            assert (wide[:, left + hidden :] == 7).all()
        group.barrier(20)


@layouts
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_accumulate_adds_in_float32_and_rounds_once(layout: str, dtype: str) -> None:
    run_threads(_accumulate, R, make_case(config(layout, combine_dtype=dtype), R, dropped=0.4))


def _accumulate(group: mc.Group, case: Case) -> None:
    rng = np.random.default_rng(5)
    before = [rng.normal(0, 9, o.shape).astype(o.dtype) for o in case.outs]
    weights = None if case.cfg.layout == "rank" else case.weights
    expected = mc.reference.combine(
        case.cfg, R, case.ys, case.idxs, weights, outs=before, accumulate=True
    )
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(*dispatch_arguments(case, group.rank))
        out = before[group.rank].copy()
        assert combine(comm, case, recv.handle, out=out, accumulate=True) is out
        assert_same_bits(out, expected[group.rank], "out")
        group.barrier(20)


def test_a_refused_out_leaves_the_handle_usable() -> None:
    run_threads(_refused_out, 1, make_case(config("batched"), 1))


def _refused_out(group: mc.Group, case: Case) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(*dispatch_arguments(case, 0))
        with pytest.raises(mc.DtypeError, match="y has dtype float32"):
            comm.combine_send(case.ys[0].astype(np.float32), recv.handle)
        comm.combine_send(case.ys[0], recv.handle)
        for arguments in (
            {"out": np.zeros(case.outs[0].shape, np.float32)},
            {"out": case.outs[0][:-1]},
            {"accumulate": True},
            {"topk_weights": case.weights[0][:, :2]},
        ):
            with pytest.raises(mc.ConfigError):
                comm.combine_recv(recv.handle, **{"topk_weights": case.weights[0], **arguments})
        out = comm.combine_recv(recv.handle, case.weights[0])
        assert_same_bits(out, case.outs[0], "out")


# ---- weights ----------------------------------------------------------------------------------


def test_weights_at_dispatch_or_at_combine_or_at_both() -> None:
    """Those of combine hold; given at dispatch alone they are kept."""
    run_threads(_weights, 2, make_case(config("grouped"), 2))


def _weights(group: mc.Group, case: Case) -> None:
    rank = group.rank
    x, idx, y = case.xs[rank], case.idxs[rank], case.ys[rank]
    right, wrong = case.weights[rank], np.full_like(case.weights[rank], 99)
    with mc.MoeComm(case.cfg, group) as comm:
        for at_dispatch, at_combine in ((right, None), (None, right), (wrong, right)):
            recv = comm.dispatch(x, idx, at_dispatch)
            assert (recv.topk_weights is None) == (at_dispatch is None)
            out = comm.combine(y, recv.handle, at_combine)
            assert_same_bits(out, case.outs[rank], "out")
        handle = comm.dispatch(x, idx).handle
        comm.combine_send(y, handle)
        with pytest.raises(mc.ConfigError, match="topk_weights=None: must be given"):
            comm.combine_recv(handle)
        comm.combine_recv(handle, right)
        group.barrier(20)


def test_a_combine_that_is_refused_has_sent_nothing() -> None:
    """Whichever half the argument is for; and may be tried again."""
    run_threads(_refused, 2, make_case(config("grouped"), 2))


def _refused(group: mc.Group, case: Case) -> None:
    y, right = case.ys[group.rank], case.weights[group.rank]
    out = np.empty_like(case.outs[group.rank])
    wrong: list[tuple[Any, ...]] = [
        (y[:, :-1], right), (y, None), (y, right[:, :-1]), (y, right, out[:, :-1]),
        (y, right, None, True),
    ]  # fmt: skip
    with mc.MoeComm(case.cfg, group) as comm:
        handle = comm.dispatch(case.xs[group.rank], case.idxs[group.rank]).handle
        for first, *others in wrong:
            with pytest.raises(mc.ConfigError):
                comm.combine(first, handle, *others)
        assert_same_bits(comm.combine(y, handle, right), case.outs[group.rank], "out")
        group.barrier(20)


@pytest.mark.parametrize("layout", ["sender", "rank"])
def test_weights_that_combine_cannot_use_are_refused(layout: str) -> None:
    run_threads(_no_weights, 1, make_case(config(layout), 1))


def _no_weights(group: mc.Group, case: Case) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(*dispatch_arguments(case, 0))
        comm.combine_send(case.ys[0], recv.handle)
        with pytest.raises(mc.ConfigError, match="topk_weights given to combine"):
            comm.combine_recv(recv.handle, case.weights[0])
        assert_same_bits(comm.combine_recv(recv.handle), case.outs[0], "out")


# ---- num_tokens ---------------------------------------------------------------------------------


@layouts
def test_rows_past_num_tokens_do_not_exist(layout: str) -> None:
    """Their experts may be anything, and their rows of ``out`` stay as they are."""
    cfg = config(layout)
    cases = [make_case(cfg, R, seed, tokens=t) for seed, t in enumerate([(3, 0, 9), (0, 0, 1)])]
    run_threads(_num_tokens, R, cases)


def _num_tokens(group: mc.Group, cases: list[Case]) -> None:
    rank, rows = group.rank, BASE["max_tokens"]
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            tokens = len(case.xs[rank])
            x, idx, weights, _ = (
                None if a is None else np.concatenate([a, np.full_like(a, 99, shape=s)])
                for a in dispatch_arguments(case, rank)
                for s in [() if a is None else (rows - tokens, *a.shape[1:])]
            )
            recv = comm.dispatch(x, idx, weights, num_tokens=np.array([tokens], np.int32))
            compare_received(case, rank, recv)
            all_weights = None
            if not case.weights_at_dispatch:
                padding = np.full((rows - tokens, BASE["top_k"]), np.nan, np.float32)
                all_weights = np.concatenate([case.weights[rank], padding])
            out = np.full((rows, BASE["hidden"]), 5, case.outs[rank].dtype)
            comm.combine(case.ys[rank], recv.handle, all_weights, out=out)
            assert_same_bits(out[:tokens], case.outs[rank], "out")
            assert (out[tokens:] == 5).all()
        group.barrier(20)


@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("checked", [True, False])
def test_num_tokens_out_of_range(number: int, checked: bool) -> None:
    run_threads(_bad_num_tokens, 1, number, checked)


def _bad_num_tokens(group: mc.Group, number: int, checked: bool) -> None:
    cfg = config("batched", check_values=checked)
    with mc.MoeComm(cfg, group) as comm:
        given = np.ones((2, 40), numpy_dtype("bfloat16")), np.zeros((2, 3), np.int32)
        tokens = np.array([number], np.int32)
        if checked:
            with pytest.raises(
                mc.ConfigError, match=f"num_tokens={number}: must be from 0 to the 2"
            ):
                comm.dispatch(*given, num_tokens=tokens)
        else:  # taken for the nearest number that is possible
            recv = comm.dispatch(*given, num_tokens=tokens)
            assert recv.counts[0] == (0 if number < 0 else 2)


# ---- trim ----------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_trim_cuts_to_what_came(layout: str, kind: str) -> None:
    fields = {"dispatch_dtype": "float8_e4m3fn", "scale_block": 16}
    run_threads(_trim, R, make_case(config(layout, **fields), R, input_dtype="bfloat16"), kind)


def _trim(group: mc.Group, case: Case, kind: str) -> None:
    expected = case.recv[group.rank]
    rows = int(expected.num_rows[0])
    if case.cfg.layout == "batched":
        rows = int(expected.counts.max(initial=0))
    with mc.MoeComm(case.cfg, group) as comm:
        given = dispatch_arguments(case, group.rank)
        if kind == "torch":
            given = tuple(None if a is None else to_torch(a) for a in given)
        recv = comm.dispatch(*given)
        cut = recv.trim()
        for name in ("x", "x_scale", "src_rank", "src_token", "topk_weights", "topk_idx"):
            full, exact = getattr(recv, name), getattr(cut, name)
            assert (full is None) == (exact is None)
            if full is None:
                continue
            assert isinstance(exact, torch.Tensor if kind == "torch" else np.ndarray)
            row_axis = 1 if case.cfg.layout == "batched" else 0
            assert exact.shape == (*full.shape[:row_axis], rows, *full.shape[row_axis + 1 :])
            used = used_rows(case, group.rank)
            cut_used = used[:, :rows] if row_axis else used[:rows]
            assert cut_used.sum() == used.sum()
            assert_same_bits(to_numpy(exact)[cut_used], getattr(expected, name)[used], name)
        assert cut.handle is recv.handle
        group.barrier(20)


def test_trim_of_nothing_keeps_the_shapes() -> None:
    for layout in LAYOUTS:
        cfg = config(layout)
        case = make_case(cfg, 1, tokens=(0,))
        run_threads(_trim, 1, case, "numpy")


# ---- inputs are the caller's -----------------------------------------------------------------


@layouts
def test_inputs_are_not_written(layout: str) -> None:
    run_threads(_frozen, 2, make_case(config(layout), 2))


def _frozen(group: mc.Group, case: Case) -> None:
    rank = group.rank
    for array in (case.xs[rank], case.idxs[rank], case.weights[rank], case.ys[rank]):
        array.flags.writeable = False
    with mc.MoeComm(case.cfg, group) as comm:
        run_case(comm, case)
        group.barrier(20)
