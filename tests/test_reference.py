"""The reference's dispatch against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from payload import token_of
from small_reference import BF16, TWO, config, ids, tokens, two_ranks

from moecomm import reference
from moecomm.errors import ConfigError


def test_expert_range_gives_the_first_ranks_one_more() -> None:
    assert [list(reference.expert_range(8, 3, r)) for r in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]
    assert [list(reference.expert_range(2, 3, r)) for r in range(3)] == [[0], [1], []]
    assert list(reference.expert_range(256, 1, 0)) == list(range(256))
    spans = [reference.expert_range(256, 3, r) for r in range(3)]
    assert [(s.start, s.stop) for s in spans] == [(0, 86), (86, 171), (171, 256)]


def test_batched_rows_by_source_then_token() -> None:
    cfg, xs = two_ranks(layout="batched")
    first, second = reference.dispatch(cfg, 2, xs, TWO)
    assert first.x.shape == (2, 6, 4)
    assert first.x.dtype == BF16
    assert first.counts.tolist() == [4, 1]
    assert second.counts.tolist() == [3, 1]
    assert first.offsets is not None
    assert first.offsets.tolist() == [0, 6, 12]
    assert first.num_rows.tolist() == [5]
    assert second.num_rows.tolist() == [4]
    # expert 0: rank 0's tokens 0 and 2, then rank 1's 0 and 1
    assert first.src_rank[0].tolist() == [0, 0, 1, 1, -1, -1]
    assert first.src_token[0].tolist() == [0, 2, 0, 1, -1, -1]
    assert [token_of(row) for row in first.x[0, :4]] == [0, 2, 3, 4]
    assert first.src_rank[1].tolist() == [0, -1, -1, -1, -1, -1]
    assert token_of(first.x[1, 0]) == 1
    # expert 2: rank 0's tokens 0 and 1, then rank 1's 1; expert 3: rank 1's 0
    assert [token_of(row) for row in second.x[0, :3]] == [0, 1, 4]
    assert token_of(second.x[1, 0]) == 3
    assert not first.x[0, 4:].astype(np.float32).any()
    assert first.topk_idx is None
    assert first.topk_weights is None
    assert first.x_scale is None


def test_weights_follow_their_rows() -> None:
    cfg, xs = two_ranks(layout="batched")
    weights = [
        np.array([[0.5, 0.25], [0.125, 2], [3, np.nan]], np.float32),
        np.array([[4, 5], [6, 7]], np.float32),
    ]
    first, second = reference.dispatch(cfg, 2, xs, TWO, weights)
    assert first.topk_weights is not None
    assert second.topk_weights is not None
    assert first.topk_weights.dtype == np.float32
    assert first.topk_weights.tolist() == [[0.5, 3, 5, 7, 0, 0], [2, 0, 0, 0, 0, 0]]
    assert second.topk_weights.tolist() == [[0.25, 0.125, 6, 0, 0, 0], [4, 0, 0, 0, 0, 0]]


def test_grouped_counts_are_true_and_offsets_padded() -> None:
    cfg, xs = two_ranks(layout="grouped", expert_alignment=4)
    first, second = reference.dispatch(cfg, 2, xs, TWO)
    assert first.counts.tolist() == [4, 1]
    assert first.offsets is not None
    assert first.offsets.tolist() == [0, 4, 8]
    assert first.num_rows.tolist() == [8]
    assert [token_of(row) for row in first.x[:5]] == [0, 2, 3, 4, 1]
    assert first.src_rank[:8].tolist() == [0, 0, 1, 1, 0, -1, -1, -1]
    assert first.src_token[:8].tolist() == [0, 2, 0, 1, 1, -1, -1, -1]
    assert not first.x[5:].astype(np.float32).any()
    assert second.offsets is not None
    assert second.offsets.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("alignment", "offsets"),
    [(1, [0, 1, 1, 10]), (8, [0, 8, 8, 24]), (128, [0, 128, 128, 256])],
)
def test_alignment_with_counts_1_0_9(alignment: int, offsets: list[int]) -> None:
    cfg = config(
        num_experts=3, top_k=1, max_tokens=10, layout="grouped", expert_alignment=alignment
    )
    idx = ids(*[[2]] * 4, [0], *[[2]] * 5)
    (got,) = reference.dispatch(cfg, 1, [tokens(0, 10, cfg)], [idx])
    assert got.counts.tolist() == [1, 0, 9]
    assert got.offsets is not None
    assert got.offsets.tolist() == offsets
    assert token_of(got.x[0]) == 4
    start = offsets[2]
    assert [token_of(row) for row in got.x[start : start + 9]] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    pads = np.setdiff1d(np.arange(offsets[3]), [0, *range(start, start + 9)])
    assert not got.x[pads].astype(np.float32).any()
    assert set(got.src_rank[pads].tolist()) <= {-1}
    assert set(got.src_token[pads].tolist()) <= {-1}


def test_rank_layout_has_one_row_per_token_and_rank() -> None:
    cfg, xs = two_ranks(layout="rank")
    weights = [
        np.array([[0.5, 0.25], [0.125, 2], [3, np.nan]], np.float32),
        np.array([[4, 5], [6, 7]], np.float32),
    ]
    first, second = reference.dispatch(cfg, 2, xs, TWO, weights)
    assert first.x.shape == (6, 4)
    assert first.offsets is None
    assert first.num_rows.tolist() == [5]
    assert first.counts.tolist() == [4, 1]
    assert [token_of(row) for row in first.x[:5]] == [0, 1, 2, 3, 4]
    assert first.topk_idx is not None
    assert first.topk_idx.tolist() == [[0, -1], [-1, 1], [0, -1], [-1, 0], [-1, 0], [-1, -1]]
    assert first.topk_weights is not None
    assert first.topk_weights.tolist() == [[0.5, 0], [0, 2], [3, 0], [0, 5], [0, 7], [0, 0]]
    assert second.num_rows.tolist() == [4]
    assert [token_of(row) for row in second.x[:4]] == [0, 1, 3, 4]
    assert second.topk_idx is not None
    assert second.topk_idx[:4].tolist() == [[-1, 0], [0, -1], [1, -1], [0, -1]]
    assert second.src_rank.tolist() == [0, 0, 1, 1, -1, -1]
    assert second.src_token.tolist() == [0, 1, 0, 1, -1, -1]


def test_rank_layout_token_on_two_local_experts_is_one_row() -> None:
    cfg = config(layout="rank")
    (got,) = reference.dispatch(cfg, 1, [tokens(0, 2, cfg)], [ids([3, 1], [0, 0])])
    assert got.num_rows.tolist() == [2]
    assert got.counts.tolist() == [1, 1, 0, 1]
    assert got.topk_idx is not None
    assert got.topk_idx[:2].tolist() == [[3, 1], [0, -1]]


def test_repeated_expert_is_one_row_with_summed_weight() -> None:
    cfg = config(top_k=4, layout="batched")
    idx = ids([1, 0, 1, 1])
    weights = [np.array([[2**24, 8, 1, 1]], np.float32)]
    (got,) = reference.dispatch(cfg, 1, [tokens(0, 1, cfg)], [idx], weights)
    assert got.counts.tolist() == [1, 1, 0, 0]
    assert got.topk_weights is not None
    # float32 in slot order: 2^24 + 1 rounds back to 2^24, twice. (1 + 1 + 2^24 would not.)
    assert got.topk_weights[1, 0] == 2**24
    assert got.topk_weights[0, 0] == 8


def test_repeated_expert_in_rank_layout_keeps_its_first_place() -> None:
    cfg = config(top_k=4, layout="rank")
    weights = [np.array([[1, 2, 4, 8]], np.float32)]
    (got,) = reference.dispatch(cfg, 1, [tokens(0, 1, cfg)], [ids([3, 1, 3, -1])], weights)
    assert got.topk_idx is not None
    assert got.topk_weights is not None
    assert got.topk_idx[0].tolist() == [3, 1, -1, -1]
    assert got.topk_weights[0].tolist() == [5, 2, 0, 0]


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_everything_on_the_other_rank(layout: Any) -> None:
    cfg = config(layout=layout)
    xs = [tokens(0, 3, cfg), tokens(1, 1, cfg)]
    first, second = reference.dispatch(cfg, 2, xs, [ids([2, 3], [2, 3], [3, 2]), ids([3, -1])])
    assert first.counts.tolist() == [0, 0]
    assert first.num_rows.tolist() == [0]
    assert (first.src_rank == -1).all()
    assert second.counts.tolist() == [3, 4]


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_no_tokens_anywhere(layout: Any) -> None:
    cfg = config(layout=layout)
    empty = [np.empty((0, 4), BF16)] * 2
    for got in reference.dispatch(cfg, 2, empty, [np.empty((0, 2), np.int32)] * 2):
        assert got.counts.tolist() == [0, 0]
        assert got.num_rows.tolist() == [0]


def test_more_ranks_than_experts() -> None:
    cfg = config(num_experts=2, layout="batched")
    idx = [ids([1, 0]), ids([0, -1]), ids([1, -1])]
    got = reference.dispatch(cfg, 3, [tokens(g, 1, cfg) for g in range(3)], idx)
    assert [g.counts.tolist() for g in got] == [[2], [2], []]
    assert got[2].x.shape == (0, 9, 4)
    assert got[2].offsets is not None
    assert got[2].offsets.tolist() == [0]
    assert [token_of(row) for row in got[1].x[0, :2]] == [0, 6]


def test_uneven_experts_on_three_ranks() -> None:
    cfg = config(num_experts=8, top_k=8, max_tokens=1, layout="grouped")
    got = reference.dispatch(cfg, 3, [tokens(g, 1, cfg) for g in range(3)], [ids([*range(8)])] * 3)
    assert [g.counts.tolist() for g in got] == [[3] * 3, [3] * 3, [3] * 2]
    assert [g.x.shape[0] for g in got] == [9, 9, 6]
    assert [token_of(row) for row in got[2].x] == [0, 1, 2, 0, 1, 2]


def test_replicas_are_one_source() -> None:
    cfg = config(replicas=2, max_tokens=2, layout="batched")
    xs = [tokens(g // 2, 2, cfg) for g in range(4)]
    idx = [ids([0, 3], [3, 1])] * 2 + [ids([3, -1], [0, -1])] * 2
    got = reference.dispatch(cfg, 4, xs, idx)
    assert [g.x.shape for g in got] == [(1, 4, 4)] * 4
    assert [g.counts.tolist() for g in got] == [[2], [1], [0], [3]]
    assert got[3].src_rank[0].tolist() == [0, 0, 1, -1]
    assert got[3].src_token[0].tolist() == [0, 1, 0, -1]
    assert got[0].src_rank[0].tolist() == [0, 1, -1, -1]


def test_replicas_that_differ_are_refused() -> None:
    cfg = config(replicas=2)
    idx = [ids([0, 1])] * 4
    xs = [tokens(g // 2, 1, cfg) for g in range(4)]
    xs[1] = tokens(5, 1, cfg)
    with pytest.raises(ConfigError, match=r"x of rank 1: replicas=2"):
        reference.dispatch(cfg, 4, xs, idx)
    with pytest.raises(ConfigError, match="replicas"):
        reference.dispatch(cfg, 3, xs[:3], idx[:3])
