"""Memory areas of more than 2 and 4 GiB. Pages exist once they are touched: few tokens, large caps.

Each test says which offsets it uses, so that it cannot stop crossing the boundaries unnoticed.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case
from guards import memory
from payload import assert_same_bits
from schedules import dispatch_arguments
from threads import run_threads

import moecomm as mc

GIB = 2**30
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poison, which would touch every page; and address space for it all."""
    monkeypatch.delenv("MOECOMM_POISON", raising=False)
    try:
        mmap.mmap(-1, 7 * GIB).close()
    except OSError as error:
        pytest.skip(f"cannot map 7 GiB: {error}")


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 6, "top_k": 1, "hidden": 4100, "max_tokens": 4, "timeout_s": 30.0}
    return mc.MoeConfig(**{**base, **fields})


def run_large(cfg: mc.MoeConfig, cases: list[Case]) -> None:
    """The cases, which are of a small ``max_tokens``, with all handles open at once."""
    run_threads(_all_open, 2, cfg, cases)


def _all_open(group: mc.Group, cfg: mc.MoeConfig, cases: list[Case]) -> None:
    rank = group.rank
    with mc.MoeComm(cfg, group) as comm:
        handles = [comm.dispatch_send(*dispatch_arguments(case, rank)) for case in cases]
        for handle, case in zip(handles, cases, strict=True):
            recv = comm.dispatch_recv(handle)
            y = np.zeros(comm.layout.recv_shape, case.ys[rank].dtype)  # touched where written
            for ours, theirs in rows_of(case, rank):
                for name in ("x", "src_rank", "src_token"):
                    expected = getattr(case.recv[rank], name)[theirs]
                    assert_same_bits(getattr(recv, name)[ours], expected, name)
                y[ours] = case.ys[rank][theirs]
            comm.combine_send(y, handle)
        group.barrier(60)
        for handle, case in zip(handles, cases, strict=True):
            check_places(comm, case, handle.slot)
            weights = None if case.weights_at_dispatch else case.weights[rank]
            out = comm.combine_recv(handle, weights)
            assert_same_bits(out, case.outs[rank], "out")
        group.barrier(60)


def check_places(comm: mc.MoeComm, case: Case, slot: int) -> None:
    """Records and returned rows lie where the layout says: sender and receiver might agree on a
    place that is wrong for both."""
    layout, cfg, rank = comm.layout, comm.config, comm.group.rank
    base = comm._runtime.symmetric
    owner = {e: r for r in range(2) for e in layout.expert_range(r)}
    for group, idx in enumerate(case.idxs):
        came = sum(any(owner[e] == rank for e in row) for row in idx)
        for i in range(came):
            number = (slot * layout.num_groups + group) * cfg.max_tokens + i
            at = layout.symmetric["record"].offset + number * layout.record_bytes
            assert memory(base + at, layout.record_bytes).any(), f"no record {i} of group {group}"
    for token, row in enumerate(case.idxs[rank]):
        places = len({owner[e] for e in row}) if layout.rows_per_rank else len(row)
        for place in range(places):
            number = (slot * cfg.max_tokens + token) * layout.combine_places + place
            at = layout.symmetric["combine_row"].offset + number * layout.combine_stride
            assert memory(base + at, layout.combine_row_bytes).any(), f"no row of token {token}"


def rows_of(case: Case, rank: int) -> Iterator[tuple[Any, Any]]:
    """Indices of the rows that came: in the large receive area and in the small one, where
    ``max_recv_tokens`` leaves them the same but for what lies between experts."""
    recv = case.recv[rank]
    if case.cfg.layout == "batched":
        for expert, count in enumerate(recv.counts):
            yield (expert, slice(count)), (expert, slice(count))
    else:
        rows = slice(int(recv.num_rows[0]))
        yield rows, rows


def cases_of(cfg: mc.MoeConfig, number: int) -> list[Case]:
    """Every token goes somewhere; both ranks have four."""
    small = dataclasses.replace(cfg, max_tokens=4, max_recv_tokens=None)
    return [make_case(small, 2, n, tokens=(4, 4), dropped=0.0, repeated=0.0) for n in range(number)]


def test_recv_x_across_2_and_4_gib() -> None:
    """batched: the first rows of the rank's second and third expert lie across a boundary."""
    cfg = config(max_tokens=130_944, in_flight=1, num_experts=6, top_k=3)
    layout = mc.Layout(cfg, 2, 0)
    for expert, boundary in ((1, 2 * GIB), (2, 4 * GIB)):
        start = expert * layout.expert_capacity * layout.wire_row_bytes
        assert start < boundary < start + layout.wire_row_bytes
    cases = cases_of(cfg, 1)
    assert all(recv.counts.min() > 0 for recv in cases[0].recv)
    run_large(cfg, cases)


@pytest.mark.parametrize("layout", ["grouped", "rank"])
def test_recv_x_of_several_handles_across_2_and_4_gib(layout: Any) -> None:
    cfg = config(max_tokens=131_072, in_flight=3, layout=layout)
    slot_bytes = mc.Layout(cfg, 2, 0).recv_slot_bytes
    assert slot_bytes > 2 * GIB
    run_large(cfg, cases_of(cfg, 3))


@pytest.mark.parametrize("wire", ["flags", "lines"])
@pytest.mark.parametrize("layout", ["batched", "rank"])
def test_records_across_2_and_4_gib(wire: Any, layout: Any) -> None:
    """Rows of the second handle lie beyond 2 GiB, of the third beyond 4 GiB; a cap keeps the
    rest small."""
    cfg = config(
        hidden=4100 if wire == "flags" else 4104, max_tokens=131_072, in_flight=3,
        layout=layout, wire=wire, max_recv_tokens=16,
    )  # fmt: skip
    sizes = mc.Layout(cfg, 2, 0)
    assert sizes.num_groups * cfg.max_tokens * sizes.record_bytes > 2 * GIB
    run_large(cfg, cases_of(cfg, 3))


def test_a_record_that_lies_across_2_gib() -> None:
    cfg = config(max_tokens=127_100, in_flight=3, max_recv_tokens=16)
    sizes = mc.Layout(cfg, 2, 0)
    slot_bytes = sizes.num_groups * cfg.max_tokens * sizes.record_bytes
    # Of rank 0's first token, in the second and in the third slot.
    assert slot_bytes < 2 * GIB < slot_bytes + sizes.record_bytes
    assert 2 * slot_bytes < 4 * GIB < 2 * slot_bytes + sizes.record_bytes
    run_large(cfg, cases_of(cfg, 3))


@pytest.mark.parametrize("wire", ["flags", "lines"])
@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_combine_rows_across_2_and_4_gib(wire: Any, reduce: Any) -> None:
    cfg = config(
        hidden=4100 if wire == "flags" else 4104, top_k=2, max_tokens=140_000, in_flight=3,
        reduce=reduce, wire=wire, max_recv_tokens=16,
    )  # fmt: skip
    sizes = mc.Layout(cfg, 2, 0)
    assert cfg.max_tokens * sizes.combine_places * sizes.combine_stride > 2 * GIB
    run_large(cfg, cases_of(cfg, 3))


def far_apart(array: Array, stride: int) -> Array:
    """The same rows, ``stride`` bytes apart."""
    rows, columns = array.shape
    memory = mmap.mmap(-1, (rows - 1) * stride + columns * array.itemsize)
    spread = np.ndarray(array.shape, array.dtype, memory, strides=(stride, array.itemsize))
    spread[:] = array
    return spread


@pytest.mark.parametrize("wire", ["flags", "lines"])
def test_callers_rows_that_lie_gigabytes_apart(wire: Any) -> None:
    """x, routing, weights, scales, y and out, three rows each, 2 GiB and a bit apart."""
    cfg = config(
        num_experts=3, hidden=96, max_tokens=3, layout="grouped", wire=wire,
        dispatch_dtype="float8_e4m3fn", scale_block=16,
    )  # fmt: skip
    case = make_case(cfg, 1, idxs=[np.array([[2], [1], [2]], np.int32)])
    run_threads(_far_apart, 1, case)


def _far_apart(group: mc.Group, case: Case) -> None:
    stride = 2 * GIB + 64
    with mc.MoeComm(case.cfg, group) as comm:
        arguments = (case.xs[0], case.idxs[0], case.weights[0], case.x_scales[0])
        recv = comm.dispatch(*(far_apart(a, stride) for a in arguments))
        assert_same_bits(recv.x, case.recv[0].x, "x")
        assert_same_bits(recv.x_scale, case.recv[0].x_scale, "x_scale")
        out = far_apart(np.zeros_like(case.outs[0]), stride)
        comm.combine(far_apart(case.ys[0], stride), recv.handle, out=out)
        assert_same_bits(out, case.outs[0], "out")


# ---- arithmetic alone -----------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 72, 1000, 1024])
@pytest.mark.parametrize("num_experts", [1, 256, 2047, 2048])
@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_layouts_of_up_to_1024_ranks_and_2048_experts(
    num_ranks: int, num_experts: int, layout: Any
) -> None:
    cfg = config(
        num_experts=num_experts, top_k=min(8, num_experts), hidden=7168, max_tokens=1024,
        layout=layout, expert_alignment=128 if layout == "grouped" else 1,
        dispatch_dtype="float8_e4m3fn", scale_block=128,
    )  # fmt: skip
    ranks = sorted({0, 1, num_ranks // 2, num_ranks - 1} & set(range(num_ranks)))
    layouts = [mc.Layout(cfg, num_ranks, rank) for rank in ranks]
    first = layouts[0]
    assert all(other.constants == first.constants for other in layouts)
    hosted = [expert for rank in range(num_ranks) for expert in first.expert_range(rank)]
    assert hosted == list(range(num_experts))
    for arena in (first.symmetric, first.local):
        regions = list(arena)
        for region, after in zip(regions, [*regions[1:], None], strict=True):
            end = arena.nbytes if after is None else after.offset
            assert region.offset + region.nbytes <= end < region.offset + region.nbytes + 128
    records = cfg.in_flight * num_ranks * cfg.max_tokens
    assert first.symmetric["record"].nbytes == records * first.record_bytes
    places = cfg.in_flight * cfg.max_tokens * first.combine_places
    assert first.symmetric["combine_row"].nbytes == places * first.combine_stride
    for other in layouts:
        tokens, local = num_ranks * cfg.max_tokens, other.num_local_experts
        worst = {
            "batched": local * tokens,
            "rank": tokens if local else 0,
            "grouped": min(local * tokens, tokens * min(8, local) + local * 127),
        }[layout]
        assert other.recv_rows <= worst
        assert other.recv_rows * other.wire_row_bytes <= first.recv_slot_bytes
