"""Numbers of ranks, experts, slots and tokens that others could not take; docs/reports.md, A."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case
from simulated import exchange, run_cases
from threads import run_threads

import moecomm as mc
from moecomm.emulator import simulate
from moecomm.kernels.emulated import EmulatedKernels
from moecomm.kernels.geometry import Machine

pytestmark = pytest.mark.usefixtures("poisoned")

LAYOUTS = ("batched", "grouped", "rank")


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens": 4, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


def idx_of(rng: np.random.Generator, tokens: int, experts: range, top_k: int) -> Any:
    order = np.argsort(rng.random((tokens, len(experts))), axis=1)[:, :top_k]
    return (experts.start + order).astype(np.int32)


@pytest.mark.parametrize("max_tokens", [1, 67, 672])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a12_any_cap_on_tokens(max_tokens: int, layout: str) -> None:
    """Full, and one token short of it."""
    cfg = config(max_tokens=max_tokens, hidden=4, layout=layout)
    tokens = [(max_tokens, max_tokens - 1), (1, max_tokens)]
    run_threads(run_cases, 2, [make_case(cfg, 2, tokens=counts) for counts in tokens])


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a17_a_group_of_one(top_k: int, layout: str) -> None:
    """The same path, and (T, H) comes out, not (T * K, H)."""
    (case,) = exchange(config(top_k=top_k, layout=layout), 1, tokens=(3,))
    assert case.outs[0].shape == (3, 16)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "hosted"),
    [(8, 3, [3, 3, 2]), (2, 5, [1, 1, 0, 0, 0]), (1, 4, [1, 0, 0, 0]), (256, 3, [86, 85, 85])],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a18_experts_that_do_not_divide_by_the_ranks(
    num_experts: int, num_ranks: int, hosted: list[int], layout: str
) -> None:
    """The first ``E % R`` ranks host one more; ranks without an expert still send and combine."""
    cfg = config(num_experts=num_experts, top_k=min(2, num_experts), layout=layout)
    assert [len(mc.Layout(cfg, num_ranks, r).expert_range(r)) for r in range(num_ranks)] == hosted
    cases = exchange(cfg, num_ranks, steps=2, tokens=(4,) * num_ranks)
    for rank, recv in enumerate(cases[0].recv):
        assert recv.counts.shape == (hosted[rank],)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a19_a20_any_number_of_ranks(num_ranks: int, layout: str) -> None:
    """Every rank's tokens go to every rank, over two steps. Nothing counts ranks per node, so
    two nodes of 1, 2 or 3 ranks are groups of 2, 4 and 6."""
    top_k = min(num_ranks, 8)
    cfg = config(num_experts=num_ranks, top_k=top_k, layout=layout)
    every = np.arange(3 * top_k, dtype=np.int32).reshape(3, top_k) % num_ranks
    few = num_ranks < 10
    cases = exchange(
        cfg, num_ranks, steps=2, idxs=[every] * num_ranks, checks="strict" if few else False
    )
    for recv in cases[0].recv:
        assert set(recv.src_rank[recv.src_rank >= 0].tolist()) == set(range(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "reduce"),
    [(33, "receiver"), (33, "sender"), (65, "receiver"), (72, "sender"), (129, "receiver")],
)
def test_a21_more_ranks_than_a_warp_or_a_word_has_bits(num_ranks: int, reduce: Any) -> None:
    cfg = config(
        num_experts=num_ranks + 3, top_k=5, hidden=8, max_tokens=2, reduce=reduce, num_sms=2
    )
    exchange(cfg, num_ranks, checks=False, seeds=(0,), tokens=(2,) * num_ranks, dropped=0.0)


def test_a21_more_ranks_than_there_may_be_is_an_error_at_once() -> None:
    with pytest.raises(mc.ConfigError, match="num_ranks=1025: must be from 1 to 1024"):
        mc.Layout(config(), 1025, 0)


@pytest.mark.parametrize("num_experts", [896, 1025, 2048])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a22_more_experts_than_threads_in_a_block(num_experts: int, layout: str) -> None:
    """The last experts too; one rank, and two that split them unevenly."""
    cfg = config(num_experts=num_experts, top_k=6, hidden=4, layout=layout)
    rng = np.random.default_rng(1)
    ends = [range(6), range(num_experts - 6, num_experts)]
    for num_ranks in (1, 2):
        idxs = [idx_of(rng, 4, ends[(r + 1) % 2], 6) for r in range(num_ranks)]
        idxs[0][0, 3], idxs[0][1, 5] = num_experts - 1, -1
        exchange(cfg, num_ranks, idxs=idxs, checks=False)


def test_a22_more_experts_than_there_may_be_is_an_error_at_once() -> None:
    with pytest.raises(mc.ConfigError, match="num_experts=2049: must be .* to 2048"):
        config(num_experts=2049)


@pytest.mark.parametrize("top_k", [1, 9, 10, 11, 12, 16, 22, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a23_any_number_of_slots_up_to_a_warp(top_k: int, layout: str) -> None:
    cfg = config(num_experts=40, top_k=top_k, hidden=8, layout=layout)
    exchange(cfg, 2, steps=2, repeated=0.3)


def test_a23_a24_the_limits_on_slots_are_named() -> None:
    with pytest.raises(mc.ConfigError, match="top_k=33: must be an integer from 1 to 32"):
        config(num_experts=64, top_k=33)
    with pytest.raises(mc.ConfigError, match="top_k=4: must be at most num_experts=2"):
        config(num_experts=2, top_k=4)


@pytest.mark.parametrize("alignment", [1, 8, 128])
@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_a26_true_counts_beside_padded_offsets(alignment: int, reduce: Any) -> None:
    """Experts with 1, 0 and 9 tokens: pads are zero rows from nowhere, counts do not count them."""
    cfg = config(
        num_experts=3, top_k=1, max_tokens=10, layout="grouped",
        expert_alignment=alignment, reduce=reduce,
        dispatch_dtype="float8_e4m3fn", scale_block=16,
    )  # fmt: skip
    idx = np.array([[0], *[[2]] * 9], np.int32)
    (case,) = exchange(cfg, 1, idxs=[idx])
    (recv,) = case.recv
    step = -(-9 // alignment) * alignment
    assert recv.counts.tolist() == [1, 0, 9]
    assert recv.offsets.tolist() == [0, alignment, alignment, alignment + step]


# ---- A27: how a launch is cut up is no business of the result -----------------------------------

TUNED = config(num_experts=9, top_k=4, hidden=72, max_tokens=7)
SENDER = config(num_experts=9, top_k=4, hidden=72, max_tokens=7, layout="grouped", reduce="sender")


@pytest.fixture(scope="module")
def tuned() -> list[Case]:
    return [make_case(TUNED, 2, 0, tokens=(7, 3)), make_case(TUNED, 2, 1, tokens=(0, 6))]


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 192, 256])
def test_a27_any_launch_shape_gives_the_same(
    threads: int, tuned: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in range(1, 10):
        machine = Machine(max_blocks=blocks, threads=threads)
        monkeypatch.setattr(
            "moecomm.runtime.cpu.EmulatedKernels",
            functools.partial(EmulatedKernels, machine=machine),
        )
        if blocks == 5:
            simulate(run_cases, 2, tuned, seed=threads, checks="strict")
        else:
            run_threads(run_cases, 2, tuned)


@pytest.mark.parametrize("cfg", [TUNED, SENDER], ids=["batched", "grouped-sender"])
def test_a27_ranks_need_not_launch_alike(
    cfg: mc.MoeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has its own number of blocks and threads."""

    def kernels(layout: mc.Layout, simulation: Any) -> EmulatedKernels:
        machine = Machine(max_blocks=1 + 4 * layout.rank, threads=32 * (3 - layout.rank))
        return EmulatedKernels(layout, simulation, machine)

    monkeypatch.setattr("moecomm.runtime.cpu.EmulatedKernels", kernels)
    exchange(cfg, 3, steps=3, seeds=(0, 1, 2))


def test_a27_c08_any_num_sms_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 33, and more than the device has; on a GPU this is what tuning changes."""
    monkeypatch.setattr(
        "moecomm.runtime.cpu.EmulatedKernels",
        functools.partial(EmulatedKernels, machine=Machine(max_blocks=33, threads=32)),
    )
    for num_sms in [*range(1, 34), 1000]:
        cfg = config(num_experts=5, hidden=8, max_tokens=40, num_sms=num_sms)
        run_threads(run_cases, 2, [make_case(cfg, 2, tokens=(40, 29))])


@pytest.mark.parametrize("num_sms", [0, -1, 1.5, True])
def test_a27_c08_a_num_sms_that_means_nothing_is_an_error(num_sms: Any) -> None:
    with pytest.raises(mc.ConfigError, match="num_sms=.*: must be an integer from 1"):
        config(num_sms=num_sms)
