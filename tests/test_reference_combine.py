"""The reference's combine against sums worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from payload import assert_same_bits, payload, random_topk, random_weights

from moecomm import reference
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError

BF16 = np.dtype(ml_dtypes.bfloat16)


def config(**fields: Any) -> MoeConfig:
    return MoeConfig(**{"num_experts": 4, "top_k": 2, "hidden": 2, "max_tokens": 3, **fields})


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


def weights(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def expert_rows(cfg: MoeConfig, num_ranks: int, idx: list[np.ndarray], value: Any) -> list[Any]:
    """ys in which expert ``e`` answers ``value(e)`` in every row that it received."""
    xs = [np.zeros((len(i), cfg.hidden), BF16) for i in idx]
    ys = []
    for rank, got in enumerate(reference.dispatch(cfg, num_ranks, xs, idx)):
        y = np.full(got.x.shape, np.nan, np.float32)  # rows that nobody sent must not be read
        rows = y.reshape(-1, cfg.hidden)
        assert got.offsets is not None
        for e, first, count in zip(
            reference.expert_range(cfg.num_experts, num_ranks, rank),
            got.offsets,
            got.counts,
            strict=False,
        ):
            rows[first : first + count] = value(e)
        ys.append(y.astype(BF16))
    return ys


EIGHT = [256, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("layout", ["batched", "grouped"])
def test_one_rounding_at_the_end(layout: Any) -> None:
    # 256 + 7 * 1 = 263, rounded once to bfloat16 (steps of 2): 264. A bfloat16 sum stays at 256.
    cfg = config(num_experts=8, top_k=8, layout=layout)
    idx = [ids([*range(8)])]
    ys = expert_rows(cfg, 1, idx, lambda e: EIGHT[e])
    (out,) = reference.combine(cfg, 1, ys, idx, [weights([1.0] * 8)])
    assert out.dtype == BF16
    assert out.astype(np.float32).tolist() == [[264, 264]]


def test_sender_reduction_rounds_once_per_rank() -> None:
    # Rank 0 sends 256+1+1+1 = 259 → 260 (259 is a tie of 258 and 260; 260 is even), rank 1
    # sends 4: 264. With 256+1 on one rank, 257 → 256 and the 1 is lost: 256 + 6 = 262.
    cfg = config(num_experts=8, top_k=8, reduce="sender")
    idx, w = [ids([*range(8)]), np.empty((0, 8), np.int32)], [weights([1.0] * 8)]
    none = np.empty((0, 8), np.float32)
    xs = [np.zeros((1, 2), BF16), np.zeros((0, 2), BF16)]
    got = reference.dispatch(cfg, 2, xs, idx, [*w, none])
    ys = [np.ones(g.x.shape, BF16) for g in got]
    ys[0][0] = 256
    out, empty = reference.combine(cfg, 2, ys, idx, [*w, none])
    assert out.astype(np.float32).tolist() == [[264, 264]]
    assert empty.shape == (0, 2)

    shares = config(num_experts=8, top_k=8, reduce="sender", max_tokens=1)
    four = [idx[0], *[idx[1]] * 3]
    got = reference.dispatch(shares, 4, [xs[0], *[xs[1]] * 3], four, [*w, none, none, none])
    ys = [np.ones(g.x.shape, BF16) for g in got]
    ys[0][0] = 256
    out = reference.combine(shares, 4, ys, four, [*w, none, none, none])[0]
    assert out.astype(np.float32).tolist() == [[262, 262]]


def test_products_are_rounded_before_they_are_added() -> None:
    # w*y = (1+2^-12)^2 = 1 + 2^-11 + 2^-24 → rounds to 1 + 2^-11 in float32. Added to -1 that
    # is 2^-11 exactly; a fused multiply-add would keep the 2^-24.
    cfg = config(dispatch_dtype="float32", combine_dtype="float32")
    near = np.float32(1 + 2.0**-12)
    ys = [np.zeros((4, 3, 2), np.float32)]
    ys[0][0, 0] = -1
    ys[0][1, 0] = near
    idx, w = [ids([0, 1])], [np.array([[1, near]], np.float32)]
    (out,) = reference.combine(cfg, 1, ys, idx, w)
    assert out.dtype == np.float32
    assert out.tolist() == [[2.0**-11, 2.0**-11]]


def test_sums_run_in_slot_order() -> None:
    # float32: (1 + 2^24) - 2^24 = 0 but (2^24 - 2^24) + 1 = 1.
    cfg = config(top_k=3, combine_dtype="float32")
    ys = [np.zeros((4, 3, 2), np.float32)]
    ys[0][0, :2], ys[0][1, :2], ys[0][2, :2] = 1, 2.0**24, -(2.0**24)
    idx = [ids([0, 1, 2], [2, 1, 0])]
    (out,) = reference.combine(cfg, 1, ys, idx, [np.ones((2, 3), np.float32)])
    assert out[:, 0].tolist() == [0, 1]


def test_dropped_slots_never_count_whatever_their_weight() -> None:
    cfg = config()
    idx = [ids([-1, 3], [-1, -1], [2, -1])]
    ys = expert_rows(cfg, 1, idx, lambda e: e + 1)
    w = [weights([np.nan, 2], [np.nan, np.inf], [0.5, np.nan])]
    (out,) = reference.combine(cfg, 1, ys, idx, w)
    assert out.astype(np.float32).tolist() == [[8, 8], [0, 0], [1.5, 1.5]]


def test_nan_weight_of_a_real_slot_is_a_value() -> None:
    cfg = config()
    idx = [ids([0, 1])]
    ys = expert_rows(cfg, 1, idx, lambda e: 1)
    (out,) = reference.combine(cfg, 1, ys, idx, [weights([np.nan, 1])])
    assert np.isnan(out.astype(np.float32)).all()


def test_repeated_expert_is_weighted_once_with_the_sum() -> None:
    cfg = config(top_k=4)
    idx = [ids([1, 0, 1, 1])]
    ys = expert_rows(cfg, 1, idx, lambda e: [10, 1, 0, 0][e])
    (out,) = reference.combine(cfg, 1, ys, idx, [weights([1, 2, 4, 8])])
    assert out.astype(np.float32).tolist() == [[33, 33]]  # 13 * 1 + 2 * 10


@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_two_ranks_exchange(reduce: Any) -> None:
    cfg = config(reduce=reduce)
    idx = [ids([0, 2], [3, 1]), ids([3, -1])]
    w = [weights([1, 2], [3, 4]), weights([5, 6])]
    xs = [np.zeros((2, 2), BF16), np.zeros((1, 2), BF16)]
    got = reference.dispatch(cfg, 2, xs, idx, w)
    ys = [np.zeros(g.x.shape, BF16) for g in got]
    ys[0][0, 0], ys[0][1, 0] = [1, 10], [2, 20]  # experts 0 and 1: one row each
    ys[1][0, 0] = [4, 40]  # expert 2: rank 0's token 0
    ys[1][1, 0], ys[1][1, 1] = [8, 80], [16, 160]  # expert 3: rank 0's token 1, rank 1's token 0
    first, second = reference.combine(cfg, 2, ys, idx, w)
    assert first.astype(np.float32).tolist() == [[9, 90], [32, 320]]  # 1+2*4; 3*8+4*2
    assert second.astype(np.float32).tolist() == [[80, 800]]


def test_rank_layout_is_a_plain_sum_over_ranks() -> None:
    cfg = config(layout="rank", combine_dtype="float32")
    # In the order of ranks 0, 1, 2: (1 + 2^24) - 2^24 = 0. Descending, or in slot order
    # (2, 0, 1), the 1 meets a smaller sum and stays.
    cfg3 = config(num_experts=3, top_k=3, layout="rank", combine_dtype="float32", max_tokens=1)
    none = np.empty((0, 3), np.int32)
    idx = [ids([2, 0, 1]), none, none]
    ys = [np.full((3, 2), np.nan, np.float32) for _ in range(3)]
    ys[0][0], ys[1][0], ys[2][0] = 1, 2.0**24, -(2.0**24)
    out = reference.combine(cfg3, 3, ys, idx)
    assert out[0].tolist() == [[0, 0]]
    assert [o.shape for o in out] == [(1, 2), (0, 2), (0, 2)]
    with pytest.raises(ConfigError, match="layout='rank'"):
        reference.combine(cfg, 1, [np.zeros((3, 2), np.float32)], [ids([0, 1])], [weights([1, 1])])


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_accumulate_starts_from_out_and_leaves_the_rest(layout: Any) -> None:
    cfg = config(top_k=1, layout=layout)
    idx = [ids([2], [-1], [0])]
    w = None if layout == "rank" else [weights([1], [1], [2])]
    rows = {"batched": (4, 3, 2), "grouped": (3, 2), "rank": (3, 2)}[layout]
    ys = [np.ones(rows, BF16)]
    before = np.array([[256, 1], [7, -0.0], [-1, 0]], BF16)
    (out,) = reference.combine(cfg, 1, ys, idx, w, outs=[before], accumulate=True)
    third = [0, 1] if layout == "rank" else [1, 2]
    # 256 + 1 = 257 rounds to 256 in bfloat16
    want = np.array([[256, 2], [7, -0.0], third], BF16)
    assert_same_bits(out, want, "out")
    assert before.astype(np.float32)[2, 0] == -1
    (fresh,) = reference.combine(cfg, 1, ys, idx, w, outs=[before])
    assert fresh.astype(np.float32)[1].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="accumulate=True"):
        reference.combine(cfg, 1, ys, idx, w, accumulate=True)


def test_every_replica_gets_the_full_output() -> None:
    cfg = config(replicas=2, max_tokens=1)
    idx = [ids([0, 3])] * 2 + [ids([3, -1])] * 2
    w = [weights([1, 2])] * 2 + [weights([3, 4])] * 2
    ys = [np.full((1, 2, 2), np.nan).astype(BF16) for _ in range(4)]
    ys[0][0, 0] = 1  # expert 0: group 0
    ys[3][0, 0], ys[3][0, 1] = 10, 100  # expert 3: groups 0 and 1
    out = reference.combine(cfg, 4, ys, idx, w)
    assert [o.astype(np.float32).tolist() for o in out] == [[[21, 21]]] * 2 + [[[300, 300]]] * 2


def test_one_rank_gives_tokens_rows_not_slots_rows(rng: np.random.Generator) -> None:
    cfg = config(num_experts=6, top_k=5, max_tokens=8)
    idx = [random_topk(rng, 8, 6, 5)]
    ys = expert_rows(cfg, 1, idx, lambda e: e + 1)
    (out,) = reference.combine(cfg, 1, ys, idx, [np.ones((8, 5), np.float32)])
    assert out.shape == (8, 2)
    assert out.astype(np.float32)[:, 0].tolist() == (idx[0] + 1).sum(axis=1).tolist()


def test_nobody_receives_on_rank_zero_yet_it_gets_its_output() -> None:
    cfg = config()
    idx = [ids([2, 3]), ids([3, 2])]
    ys = expert_rows(cfg, 2, idx, lambda e: e)
    out = reference.combine(cfg, 2, ys, idx, [weights([1, 1])] * 2)
    assert [o.astype(np.float32).tolist() for o in out] == [[[5, 5]], [[5, 5]]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_become_float32_first(dtype: str) -> None:
    cfg = config(top_k=1, combine_dtype="float32")
    third = np.array([[1 / 3]], np.float32).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    ys = [np.full((4, 3, 2), 3, np.float32)]
    (out,) = reference.combine(cfg, 1, ys, [ids([0])], [third])
    assert out[0, 0] == np.float32(3) * np.float32(third[0, 0])
    assert out[0, 0] != 1


def test_large_sums_become_infinite_without_a_warning() -> None:
    cfg = config(top_k=2, combine_dtype="float16")
    ys = [np.full((4, 3, 2), 60000, np.float16)]
    (out,) = reference.combine(cfg, 1, ys, [ids([0, 1])], [weights([1, 1])])
    assert np.isinf(out).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["batched", "grouped"])
@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_identity_experts_return_scaled_tokens(
    rng: np.random.Generator, num_ranks: int, layout: Any, reduce: Any
) -> None:
    """y = x * (e + 1) in small integers: every sum is exact, whatever the order."""
    cfg = config(
        num_experts=7, top_k=3, hidden=5, max_tokens=4, layout=layout, reduce=reduce,
        combine_dtype="float32",
    )  # fmt: skip
    xs = [payload(rank * 4 + np.arange(4), 5) for rank in range(num_ranks)]
    idx = [random_topk(rng, 4, 7, 3, dropped=0.2, repeats=True) for _ in xs]
    w = [np.where(i < 0, np.nan, np.round(random_weights(rng, i) * 8)).astype("f4") for i in idx]
    ys = []
    for rank, got in enumerate(reference.dispatch(cfg, num_ranks, xs, idx, w)):
        y = got.x.astype(np.float32)
        rows, offsets = y.reshape(-1, 5), got.offsets
        assert offsets is not None
        for local, e in enumerate(reference.expert_range(7, num_ranks, rank)):
            rows[offsets[local] : offsets[local + 1]] *= e + 1
        ys.append(y)
    out = reference.combine(cfg, num_ranks, ys, idx, w)
    for rank in range(num_ranks):
        factor = np.where(idx[rank] < 0, 0, np.nan_to_num(w[rank]) * (idx[rank] + 1)).sum(axis=1)
        want = (xs[rank].astype(np.float32) * factor[:, None]).astype(np.float32)
        assert_same_bits(out[rank], want, f"rank {rank}")


def test_wrong_outputs_are_refused() -> None:
    cfg = config()
    idx, w = [ids([0, 1])], [weights([1, 1])]
    good = np.zeros((4, 3, 2), BF16)
    with pytest.raises(ConfigError, match=r"y number 0 has shape \(3, 3, 2\)"):
        reference.combine(cfg, 1, [good[:3]], idx, w)
    with pytest.raises(DtypeError, match="y of rank 0 has dtype float32"):
        reference.combine(cfg, 1, [good.astype(np.float32)], idx, w)
    with pytest.raises(ConfigError, match="topk_weights: must be given"):
        reference.combine(cfg, 1, [good], idx)
    with pytest.raises(DtypeError, match="topk_weights has dtype float64"):
        reference.combine(cfg, 1, [good], idx, [w[0].astype(np.float64)])
