"""Routing values that users of such libraries tripped over; see docs/reports.md, rows A."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from exchange import Case, compare_received, make_case, run_case, send
from payload import assert_same_bits, payload
from simulated import exchange
from threads import run_threads

import moecomm as mc
from moecomm.dtypes import numpy_dtype
from moecomm.emulator import simulate

pytestmark = pytest.mark.usefixtures("poisoned")

INT_MAX = 2**31 - 1


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 8, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


def ids(*rows: list[int], dtype: str = "int32") -> np.ndarray[Any, Any]:
    return np.array(rows, dtype)


def test_a02_a_slot_of_minus_one_is_skipped_and_its_weight_is_not_read() -> None:
    """``make_case`` gives dropped slots the weight NaN; every layout."""
    for layout in ("batched", "grouped", "rank"):
        exchange(config(layout=layout), 2, steps=2, idxs=[ids([0, -1], [-1, -1]), ids([-1, 3])])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("bad", [4, 5, -2, INT_MAX, -INT_MAX - 1])
def test_a02_a04_other_numbers_are_errors_that_name_token_and_value(bad: int, dtype: str) -> None:
    """Also E itself, which other libraries take for "no expert"."""
    run_threads(_bad_expert, 1, ids([0, 1], [2, bad], [3, 0], dtype=dtype), bad)


@pytest.mark.parametrize("bad", [2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)])
def test_a04_a05_64_bit_values_are_not_cut_to_32_bits(bad: int) -> None:
    run_threads(_bad_expert, 1, ids([0, 1], [2, bad], dtype="int64"), bad)


def _bad_expert(group: mc.Group, idx: np.ndarray[Any, Any], bad: int) -> None:
    x = np.ones((len(idx), 16), numpy_dtype("bfloat16"))
    with mc.MoeComm(config(), group) as comm:
        with pytest.raises(mc.ConfigError, match=rf"topk_idx\[1, 1\]={bad}: must be -1"):
            comm.dispatch(x, idx)
        run_case(comm, make_case(comm.config, 1, 1))
    with mc.MoeComm(config(check_values=False), group) as comm:  # documented: dropped
        recv = comm.dispatch(x, idx)
        in_range = idx[(idx >= 0) & (idx < 4)]
        assert recv.counts.tolist() == np.bincount(in_range, minlength=4).tolist()


def test_a03_one_rank_has_all_tokens_and_the_other_none() -> None:
    """Rank 1's outputs are exactly 0, not what an earlier step left there."""
    cfg = config(max_tokens=64, combine_dtype="float32")
    full = np.tile(np.array([[0, 1]], np.int32), (64, 1))
    spread = make_case(cfg, 2, 1, tokens=(64, 64), dropped=0.0)
    lopsided = make_case(cfg, 2, 2, idxs=[full, np.full_like(full, -1)])
    assert not lopsided.outs[1].any()
    cases = [spread, lopsided, lopsided]
    for seed in (0, 1):
        simulate(_rounds, 2, cases, 3, seed=seed)
    run_threads(_rounds, 2, cases, 30)


def _rounds(group: mc.Group, cases: list[Case], rounds: int) -> None:
    rank = group.rank
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases * rounds:
            recv = comm.dispatch_recv(send(comm, case))
            out = np.full(case.outs[rank].shape, np.nan, case.outs[rank].dtype)
            comm.combine(case.ys[rank], recv.handle, case.weights[rank], out=out)
            assert_same_bits(out, case.outs[rank], f"rank {rank}")
        group.barrier(20)


def test_a05_int64_ids_give_what_int32_ids_give() -> None:
    for layout in ("batched", "grouped", "rank"):
        run_threads(_int64, 2, make_case(config(layout=layout, top_k=3), 2, repeated=0.3))


def _int64(group: mc.Group, case: Case) -> None:
    wide = dataclasses.replace(case, idxs=[i.astype(np.int64) for i in case.idxs])
    with mc.MoeComm(case.cfg, group) as comm:
        run_case(comm, case)
        run_case(comm, wide)
        run_case(comm, (case, wide)[group.rank])  # each as it likes
        group.barrier(20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["batched", "rank"])
def test_a06_weights_are_widened_before_anything_is_multiplied(dtype: str, layout: str) -> None:
    cfg = config(hidden=64, top_k=8, num_experts=8, layout=layout, combine_dtype="float32")
    case = make_case(cfg, 2, 0, tokens=(8, 8))
    narrow = [w.astype(numpy_dtype(dtype)) for w in case.weights]
    wide = [w.astype(np.float32) for w in narrow]
    recv = mc.reference.dispatch(cfg, 2, case.xs, case.idxs, wide)
    weights = None if layout == "rank" else wide
    outs = mc.reference.combine(cfg, 2, case.ys, case.idxs, weights)
    run_threads(_narrow, 2, dataclasses.replace(case, weights=narrow, recv=recv, outs=outs))


def _narrow(group: mc.Group, case: Case) -> None:
    rank = group.rank
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(case.xs[rank], case.idxs[rank], case.weights[rank])
        assert recv.topk_weights.dtype == np.float32
        compare_received(case, rank, recv)
        out = comm.combine(case.ys[rank], recv.handle)
        assert_same_bits(out, case.outs[rank], "out")
        group.barrier(20)


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_a08_a_rank_that_receives_nothing(layout: str) -> None:
    """It takes part, its rows have shape (0, H) once trimmed, and its own outputs are right."""
    case = make_case(
        config(layout=layout), 2, 0, idxs=[ids([2, 3], [3, 2], [2, -1]), ids([3, 2], [2, 2])]
    )
    assert case.recv[0].num_rows[0] == 0
    run_threads(_nothing_came, 2, case)


def _nothing_came(group: mc.Group, case: Case) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch_recv(send(comm, case))
        if group.rank == 0:
            assert not recv.counts.any()
            shape = recv.trim().x.shape
            assert shape == ((2, 0, 16) if case.cfg.layout == "batched" else (0, 16))
            empty = np.empty((0, 16), recv.x.dtype)  # what an expert makes of nothing
            assert recv.trim().x.reshape(-1, 16).shape == empty.shape
        weights = None if case.weights_at_dispatch else case.weights[group.rank]
        out = comm.combine(case.ys[group.rank], recv.handle, weights)
        assert_same_bits(out, case.outs[group.rank], "out")
        group.barrier(20)


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
@pytest.mark.parametrize("fields", [{}, {"dispatch_dtype": "float8_e4m3fn", "scale_block": 16}])
def test_a09_no_tokens_anywhere(layout: str, fields: dict[str, Any]) -> None:
    cases = exchange(config(layout=layout, **fields), 3, steps=3, tokens=(0, 0, 0), seeds=(0, 1))
    assert all(out.shape == (0, 16) for out in cases[0].outs)


def test_a10_more_tokens_than_the_cap_and_unequal_lengths_are_two_errors() -> None:
    """On one rank only; the peers get an error too, in time."""
    errors = run_threads(_too_many, 2, config(timeout_s=0.5))
    assert isinstance(errors[1], mc.PeerTimeout)
    assert errors[1].peer == 0


def _too_many(group: mc.Group, cfg: mc.MoeConfig) -> Exception | None:
    x = np.ones((9, 16), numpy_dtype("bfloat16"))
    idx = np.zeros((9, 2), np.int32)
    with mc.MoeComm(cfg, group) as comm:
        if group.rank == 0:
            with pytest.raises(mc.ConfigError, match="x has 9 tokens: .*max_tokens=8"):
                comm.dispatch(x, idx)
            with pytest.raises(mc.ConfigError, match="x has 8 tokens and topk_idx 7"):
                comm.dispatch(x[:8], idx[:7])
            group.barrier(20)
            return None
        with pytest.raises(mc.PeerTimeout) as caught:
            comm.dispatch(x[:8], idx[:8])
        group.barrier(20)
        return caught.value


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_a13_all_tokens_to_one_expert(layout: str) -> None:
    """By default there is room. With a cap below the need: one error, the need in it, no hang;
    exactly enough is enough."""
    full = np.zeros((8, 1), np.int32)
    exchange(config(layout=layout, top_k=1), 3, idxs=[full] * 3)
    exchange(config(layout=layout, top_k=1, max_recv_tokens=24), 3, idxs=[full] * 3)
    cfg = config(layout=layout, top_k=1, max_recv_tokens=23)
    errors = run_threads(_overflow, 3, cfg, full)
    assert errors == [("expert" if layout == "batched" else "rank", 0, 24, 23)] * 3


def _overflow(
    group: mc.Group, cfg: mc.MoeConfig, idx: np.ndarray[Any, Any]
) -> tuple[str, int, int, int]:
    x = payload(np.arange(len(idx)), cfg.hidden)
    with mc.MoeComm(cfg, group) as comm:
        with pytest.raises(mc.Overflow) as caught:
            comm.dispatch(x, idx)
        run_case(comm, make_case(cfg, 3, tokens=(1, 2, 3)))  # it goes on
        group.barrier(20)
    error = caught.value
    return error.where, error.expert_or_rank, error.needed, error.capacity


def test_a14_counts_under_strong_imbalance() -> None:
    """2304 tokens, 99 % of which name the same eight experts; counts equal a host's bincount."""
    cfg = config(num_experts=32, top_k=8, hidden=4, max_tokens=2304, layout="grouped")
    rng = np.random.default_rng(0)
    idx = np.tile(np.arange(8, dtype=np.int32), (2304, 1))
    odd = rng.random(2304) < 0.01
    idx[odd] = np.argsort(rng.random((odd.sum(), 32)), axis=1)[:, :8]
    counts = run_threads(_counts, 4, cfg, idx)
    assert np.concatenate(counts).tolist() == (4 * np.bincount(idx.ravel(), minlength=32)).tolist()


def _counts(group: mc.Group, cfg: mc.MoeConfig, idx: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = payload(group.rank * 2304 + np.arange(2304), cfg.hidden)
    with mc.MoeComm(cfg, group) as comm:
        recv = comm.dispatch(x, idx)
        rows = int(recv.num_rows[0])
        source = 2304 * recv.src_rank[:rows] + recv.src_token[:rows]
        assert_same_bits(recv.x[:rows], payload(source, cfg.hidden), "x")
        counts = recv.counts.copy()
        group.barrier(60)
    return counts
