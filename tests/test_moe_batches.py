"""Batches so large that blocks divide the counting, and that warps take several tasks each."""

from __future__ import annotations

import pytest
from exchange import Case, make_case, run_case

import moecomm as mc
from moecomm.emulator import simulate


@pytest.mark.parametrize("wire", ["flags", "lines"])
@pytest.mark.parametrize("tokens", [[600, 515], [513, 0], [512, 129]], ids=str)
def test_every_token_of_a_large_batch_finds_its_place(wire: str, tokens: list[int]) -> None:
    cfg = mc.MoeConfig(
        num_experts=5, top_k=3, hidden=8, max_tokens=600, layout="grouped", wire=wire,
        timeout_s=60.0,
    )  # fmt: skip
    assert mc.Layout(cfg, 2, 0).count_chunks > 1
    cases = [make_case(cfg, 2, seed, tokens=tokens) for seed in range(2)]
    simulate(_steps, 2, cases, seed=0, checks=False)


def _steps(group: mc.Group, cases: list[Case]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
