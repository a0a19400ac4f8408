"""The reference's dispatch at its limits: capacities, wrong inputs, many experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from payload import assert_same_bits, random_topk, token_of
from small_reference import BF16, TWO, config, ids, tokens, two_ranks

from moecomm import reference
from moecomm.errors import ConfigError, DtypeError, Overflow


@pytest.mark.parametrize(
    ("fields", "where", "number", "needed"),
    [
        ({"layout": "batched", "max_recv_tokens": 2}, "expert", 0, 4),
        ({"layout": "batched", "max_recv_tokens": 3}, "expert", 0, 4),
        ({"layout": "grouped", "max_recv_tokens": 4}, "rank", 0, 5),
        ({"layout": "grouped", "max_recv_tokens": 7, "expert_alignment": 4}, "rank", 0, 8),
        ({"layout": "rank", "max_recv_tokens": 4}, "rank", 0, 5),
        ({"layout": "rank", "max_recv_tokens": 3}, "rank", 0, 5),
    ],
)
def test_overflow_names_the_lowest(
    fields: dict[str, Any], where: str, number: int, needed: int
) -> None:
    cfg, xs = two_ranks(**fields)
    with pytest.raises(Overflow) as caught:
        reference.dispatch(cfg, 2, xs, TWO)
    error = caught.value
    assert (error.where, error.expert_or_rank, error.needed) == (where, number, needed)
    assert error.capacity == fields["max_recv_tokens"]


def test_overflow_of_a_later_expert_and_rank() -> None:
    idx = [ids([2, 0], [2, 1], [2, 3])]
    xs = [tokens(0, 3, config())]
    with pytest.raises(Overflow) as caught:
        reference.dispatch(config(max_recv_tokens=2), 1, xs, idx)
    assert (caught.value.where, caught.value.expert_or_rank) == ("expert", 2)
    cfg = config(max_recv_tokens=3, layout="grouped")
    both = [ids([2, 0], [2, 1], [2, 3]), np.empty((0, 2), np.int32)]
    with pytest.raises(Overflow) as caught:
        reference.dispatch(cfg, 2, [xs[0], np.empty((0, 4), BF16)], both)
    assert (caught.value.where, caught.value.expert_or_rank) == ("rank", 1)
    assert caught.value.needed == 4


@pytest.mark.parametrize(
    ("layout", "cap", "rows"), [("batched", 4, 8), ("grouped", 5, 5), ("rank", 5, 5)]
)
def test_a_cap_that_just_fits(layout: Any, cap: int, rows: int) -> None:
    cfg, xs = two_ranks(layout=layout, max_recv_tokens=cap)
    first, _ = reference.dispatch(cfg, 2, xs, TWO)
    assert first.x.reshape(-1, cfg.hidden).shape[0] == rows
    assert first.counts.tolist() == [4, 1]


def test_int32_and_int64_routing_are_the_same() -> None:
    cfg, xs = two_ranks(layout="grouped")
    narrow = reference.dispatch(cfg, 2, xs, TWO)
    wide = reference.dispatch(cfg, 2, xs, [idx.astype(np.int64) for idx in TWO])
    for a, b in zip(narrow, wide, strict=True):
        assert_same_bits(a.x, b.x, "x")


@pytest.mark.parametrize("bad", [4, 5, -2, 2**31 - 1])
def test_expert_out_of_range_is_named(bad: int) -> None:
    cfg = config()
    with pytest.raises(ConfigError, match=rf"topk_idx\[1, 0\]={bad}"):
        reference.dispatch(cfg, 1, [tokens(0, 2, cfg)], [ids([0, 1], [bad, 1])])


def test_wrong_inputs_are_refused() -> None:
    cfg = config()
    x, idx = tokens(0, 2, cfg), ids([0, 1], [2, 3])
    with pytest.raises(DtypeError, match="x has dtype float32"):
        reference.dispatch(cfg, 1, [x.astype(np.float32)], [idx])
    with pytest.raises(DtypeError, match="topk_idx has dtype float32"):
        reference.dispatch(cfg, 1, [x], [idx.astype(np.float32)])
    with pytest.raises(ConfigError, match="max_tokens=3"):
        reference.dispatch(cfg, 1, [tokens(0, 4, cfg)], [np.tile(idx, (2, 1))])
    with pytest.raises(ConfigError, match=r"shape \(1, 4\)"):
        reference.dispatch(cfg, 1, [x[:1]], [idx])
    with pytest.raises(ConfigError, match="1 arrays for 2 ranks"):
        reference.dispatch(cfg, 2, [x], [idx])
    with pytest.raises(ConfigError, match="reduce='sender'"):
        reference.dispatch(config(reduce="sender"), 1, [x], [idx])


@pytest.mark.parametrize(("num_experts", "top_k"), [(896, 8), (1025, 16), (2048, 32)])
@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_many_experts_agree_with_a_bincount(
    rng: np.random.Generator, layout: Any, num_experts: int, top_k: int
) -> None:
    cfg = config(num_experts=num_experts, top_k=top_k, hidden=2, max_tokens=5, layout=layout)
    idx = [random_topk(rng, 5, num_experts, top_k, dropped=0.1) for _ in range(3)]
    got = reference.dispatch(cfg, 3, [tokens(g, 5, cfg) for g in range(3)], idx)
    flat = np.concatenate([i.ravel() for i in idx])
    want = np.bincount(flat[flat >= 0], minlength=num_experts)
    assert np.concatenate([g.counts for g in got]).tolist() == want.tolist()


def test_all_tokens_of_all_ranks_on_one_expert() -> None:
    for layout in ("batched", "grouped", "rank"):
        cfg = config(top_k=1, layout=layout)
        idx = [ids([0], [0], [0])] * 3
        got = reference.dispatch(cfg, 3, [tokens(g, 3, cfg) for g in range(3)], idx)
        rows = got[0].x.reshape(-1, cfg.hidden)
        assert [token_of(row) for row in rows[:9]] == list(range(9))
        assert got[0].counts[0] == 9
