"""Sizes and offsets: worst cases by brute force, regions that do not touch, limits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import moecomm as mc


@pytest.mark.parametrize("align", [1, 2, 3, 4])
@pytest.mark.parametrize("num_experts", [1, 2, 3, 4])
def test_the_grouped_worst_case_is_exact(num_experts: int, align: int) -> None:
    for tokens, top_k in itertools.product(range(1, 5), range(1, num_experts + 1)):
        cfg = mc.MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            hidden=1,
            max_tokens=tokens,
            layout="grouped",
            expert_alignment=align,
        )
        worst = max(
            sum(-(-count // align) * align for count in counts)
            for counts in itertools.product(range(tokens + 1), repeat=num_experts)
            if sum(counts) <= tokens * top_k
        )
        assert mc.Layout(cfg, 1, 0).recv_rows == worst


def test_the_first_ranks_host_one_more_expert() -> None:
    cfg = mc.MoeConfig(num_experts=8, top_k=1, hidden=8, max_tokens=1)
    layout = mc.Layout(cfg, 3, 0)
    assert [layout.expert_range(r) for r in range(3)] == [range(3), range(3, 6), range(6, 8)]


def test_more_ranks_than_experts_leaves_some_without() -> None:
    cfg = mc.MoeConfig(num_experts=2, top_k=1, hidden=8, max_tokens=4, layout="rank")
    assert [mc.Layout(cfg, 3, r).num_local_experts for r in range(3)] == [1, 1, 0]
    assert mc.Layout(cfg, 3, 2).recv_rows == 0


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_regions_are_apart_and_equal_on_all_ranks(layout: str) -> None:
    cfg = mc.MoeConfig(
        num_experts=7,
        top_k=3,
        hidden=37,
        max_tokens=5,
        layout=layout,
        dispatch_dtype="float8_e4m3fn",
        scale_block=16,
    )
    layouts = [mc.Layout(cfg, 4, rank) for rank in range(4)]
    assert all(one.constants == layouts[0].constants for one in layouts)
    for arena in (layouts[0].symmetric, layouts[0].local):
        end = 0
        for region in arena:
            assert region.offset % 128 == 0
            assert region.offset >= end
            end = region.offset + region.nbytes
        assert end <= arena.nbytes


def test_where_meta_row_and_scales_of_a_record_lie() -> None:
    cfg = mc.MoeConfig(
        num_experts=256,
        top_k=8,
        hidden=7168,
        max_tokens=128,
        dispatch_dtype="float8_e4m3fn",
        scale_block=128,
    )
    flags = mc.Layout(dataclasses.replace(cfg, wire="flags"), 2, 0)
    assert flags.record_row_offset == 128  # 16 + 12 * 8, to a line of memory
    assert flags.record_scale_offset == 128 + 7168
    assert flags.record_bytes == 128 + 7168 + 256  # 56 * 4
    lines = mc.Layout(cfg, 2, 0)
    assert lines.record_bytes == 63 * 128  # 7504 bytes, 120 a line


def test_offsets_are_exact_past_4_gib() -> None:
    cfg = mc.MoeConfig(num_experts=2048, top_k=32, hidden=8192, max_tokens=4096)
    layout = mc.Layout(cfg, 1024, 1023)
    # 1023 groups' records, two slots: far past 32 bits, and nothing wraps.
    assert layout.symmetric["record"].nbytes == 2 * 1024 * 4096 * layout.record_bytes
    assert layout.symmetric["combine_row"].offset > 2**36
    assert layout.local["x"].nbytes == 2 * 2 * 1024 * 4096 * 8192 * 2


@pytest.mark.parametrize(
    ("num_ranks", "rank", "message"),
    [
        (0, 0, "num_ranks=0"),
        (1025, 0, "num_ranks=1025"),
        (4, 4, "rank=4"),
        (3, 0, "replicas=2: must divide num_ranks=3"),
    ],
)
def test_impossible_groups_are_refused(num_ranks: int, rank: int, message: str) -> None:
    cfg = mc.MoeConfig(num_experts=8, top_k=1, hidden=8, max_tokens=1, replicas=2)
    with pytest.raises(mc.ConfigError, match=message):
        mc.Layout(cfg, num_ranks, rank)


def test_more_rows_than_an_int32_counts_are_refused() -> None:
    cfg = mc.MoeConfig(num_experts=2048, top_k=1, hidden=8, max_tokens=2**20)
    with pytest.raises(mc.ConfigError, match="at most 2147483647; lower max_tokens"):
        mc.Layout(cfg, 1, 0)
