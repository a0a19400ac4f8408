"""Random cases in the simulation: what they cover, that they pass, that a wrong bit is seen."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from moecomm import fuzzing
from moecomm.cli.main import app
from moecomm.errors import ConfigError
from moecomm.fuzzing import Limits, Mismatch, Seen, draw_case, run_case
from moecomm.layout import Layout


def test_a_case_follows_from_its_seed() -> None:
    first, second = draw_case(5, Limits()), draw_case(5, Limits())
    assert first == second
    for a, b in zip(first.inputs(1, 0), second.inputs(1, 0), strict=True):
        assert a.tobytes() == b.tobytes()
    assert draw_case(6, Limits()) != first


def test_cases_cover_what_can_go_wrong() -> None:
    cases = [draw_case(seed, Limits()) for seed in range(100)]
    assert {case.cfg.layout for case in cases} == {"batched", "grouped", "rank"}
    assert {case.cfg.reduce for case in cases} == {"receiver", "sender"}
    assert {case.cfg.replicas for case in cases} == {1, 2}
    assert {case.num_ranks for case in cases} == {1, 2, 3, 4, 5}
    assert {case.cfg.in_flight for case in cases} == {1, 2}
    assert {Layout(case.cfg, case.num_ranks, 0).lines for case in cases} == {True, False}
    assert any(case.cfg.num_experts < case.num_ranks for case in cases)  # ranks without experts
    assert any(case.cfg.num_experts % case.num_ranks for case in cases)
    inputs = [case.inputs(0, 0) for case in cases]
    assert any(len(i.x) == 0 for i in inputs)
    assert any((i.topk_idx == -1).any() for i in inputs)
    assert any(
        len(set(row)) < len(row)
        for i in inputs
        for row in i.topk_idx[:, :].tolist()
        if -1 not in row
    )


def test_replicas_get_the_same_inputs() -> None:
    case = next(c for c in map(lambda s: draw_case(s, Limits()), range(99)) if c.cfg.replicas == 2)
    for a, b in zip(case.inputs(0, 0), case.inputs(0, 1), strict=True):
        assert a.tobytes() == b.tobytes()


def test_limits_are_kept() -> None:
    limits = Limits(ranks=3, tokens=2, hidden=5, steps=1, layout="rank", dtype="float32")
    for seed in range(20):
        case = draw_case(seed, limits)
        assert case.num_ranks == 3
        assert case.cfg.max_tokens <= 2
        assert case.cfg.hidden <= 5
        assert (case.cfg.layout, case.cfg.dispatch_dtype) == ("rank", "float32")
    assert limits.changed() == {
        "ranks": 3, "tokens": 2, "hidden": 5, "steps": 1, "layout": "rank", "dtype": "float32",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="steps=0"):
        Limits(steps=0)


@pytest.mark.parametrize("layout", fuzzing.LAYOUT_NAMES)
def test_kernels_agree_with_the_reference(layout: fuzzing.LayoutName) -> None:
    for seed in range(4):
        run_case(draw_case(seed, Limits(layout=layout, tokens=6, hidden=40, steps=2)))


@pytest.mark.parametrize("what", ["x", "src_token", "counts", "output"])
def test_one_wrong_bit_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    case = draw_case(3, Limits(ranks=2, tokens=8, layout="grouped"))
    real = fuzzing.simulate

    def flip(*args: object, **options: object) -> list[list[Seen]]:
        ranks: list[list[Seen]] = real(*args, **options)
        rank, step = next(
            (r, s)
            for r in range(2)
            for s in range(case.steps)
            if len(ranks[r][s].out) and ranks[r][s].recv["counts"].any()
        )
        seen = ranks[rank][step]
        array = seen.out if what == "output" else seen.recv[what]
        first = np.argwhere(seen.recv["src_token"] >= 0)[0, 0] if what in ("x", "src_token") else 0
        array[first : first + 1].view(np.uint8)[0] ^= 1
        return ranks

    monkeypatch.setattr(fuzzing, "simulate", flip)
    with pytest.raises(Mismatch, match=rf"step \d, rank \d: {what}: .* differ"):
        run_case(case)


def test_the_command_names_a_failing_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: fuzzing.Case) -> None:
        if case.seed == 12:
            raise Mismatch("step 0, rank 1: x: 1 of 8 elements differ")

    monkeypatch.setattr(fuzzing, "run_case", fail)
    shown = CliRunner().invoke(app, ["fuzz", "--first-seed", "10", "--seeds", "9", "--tokens", "5"])
    assert shown.exit_code == 1
    assert "Seed 12 failed" in shown.output
    assert "moecomm fuzz --first-seed 12 --seeds 1 --tokens 5" in shown.output
    assert "2 seeds agree" in shown.output
    shown = CliRunner().invoke(app, ["fuzz", "--first-seed", "10", "--seeds", "9", "--keep-going"])
    assert shown.exit_code == 1
    assert "8 seeds agree" in shown.output


def test_the_command_passes() -> None:
    shown = CliRunner().invoke(app, ["fuzz", "--seeds", "2", "--tokens", "4", "--hidden", "24"])
    assert shown.exit_code == 0, shown.output
    assert "2 seeds agree with the reference bit for bit" in shown.output
