"""The kernels in Python do what the CUDA C++ ones do: the same results, bit for bit, under any
schedule, with the emulator's strict checks; the same waits, reports and counters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_properties as properties
import test_roll_call as roll_call
from exchange import Case, make_case, run_case
from hypothesis import given
from hypothesis import strategies as st
from mutation_steps import cases, simulate_setting
from problems import Problem, examples, problems
from schedules import random_schedule
from simulated import exchange
from threads import run_threads

import moecomm as mc
from moecomm.dtypes import numpy_dtype
from moecomm.emulator import CheckFailure, simulate
from moecomm.kernels.numba_jit import cpu
from moecomm.kernels.numba_jit.lowered import lower
from moecomm.kernels.numba_jit.sources import read

BASE: dict[str, Any] = {
    "num_experts": 7, "top_k": 3, "hidden": 72, "max_tokens": 9, "timeout_s": 20.0
}  # fmt: skip
FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "float8_e4m3fn", "scale_block": 16}
CASES: dict[str, tuple[mc.MoeConfig, int, str | None]] = {
    "batched": (mc.MoeConfig(**BASE), 2, None),
    "grouped-aligned": (mc.MoeConfig(**BASE, layout="grouped", expert_alignment=4), 3, None),
    "rank": (mc.MoeConfig(**BASE, layout="rank"), 3, None),
    "sender": (mc.MoeConfig(**BASE, reduce="sender"), 4, None),
    "replicas": (mc.MoeConfig(**BASE, replicas=2, layout="grouped"), 4, None),
    "one-rank": (mc.MoeConfig(**BASE), 1, None),
    "more-ranks-than-experts": (mc.MoeConfig(**{**BASE, "num_experts": 3}), 5, None),
    "one-block": (mc.MoeConfig(**BASE, num_sms=1), 2, None),
    "fp8-given": (mc.MoeConfig(**FP8, layout="grouped"), 2, None),
    "fp8-no-scales": (mc.MoeConfig(**{**FP8, "scale_block": None}), 2, "float32"),
    "fp8-from-bf16": (mc.MoeConfig(**FP8), 2, "bfloat16"),
    "fp8-from-fp16": (mc.MoeConfig(**FP8, layout="rank"), 2, "float16"),
    "fp8-from-fp32-pow2": (mc.MoeConfig(**FP8, scale_pow2=True), 2, "float32"),
    "fp32-odd": (
        mc.MoeConfig(
            **{**BASE, "hidden": 203},
            dispatch_dtype="float32",
            combine_dtype="float32",
            layout="grouped",
        ),
        3,
        None,
    ),
    "fp16-top32": (
        mc.MoeConfig(
            **{**BASE, "num_experts": 40, "top_k": 32},
            dispatch_dtype="float16",
            combine_dtype="float16",
        ),
        2,
        None,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def python_kernels() -> Iterator[None]:
    """What every communicator of these tests runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_KERNELS", "numba")
        patch.setenv("MOECOMM_POISON", "1")
        yield


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_equals_the_reference(name: str) -> None:
    cfg, num_ranks, input_dtype = CASES[name]
    exchange(cfg, num_ranks, steps=2, seeds=(0, 1), input_dtype=input_dtype, skew=0.2)


def test_ranks_without_tokens() -> None:
    exchange(mc.MoeConfig(**BASE), 3, steps=2, seeds=(0, 1), tokens=(0, 9, 0))
    exchange(mc.MoeConfig(**BASE, layout="rank"), 2, seeds=(0, 1), tokens=(0, 0))


@examples(8)
@given(problem=problems(max_ranks=5, max_steps=3), seed=st.integers(0, 2**16))
def test_any_problem_equals_the_reference(problem: Problem, seed: int) -> None:
    """With handles in flight, received in any order, some closed without being combined."""
    cases = problem.cases()
    schedule = random_schedule(problem.rng, problem.num_steps, problem.cfg.in_flight, closed=0.2)
    simulate(properties._walk, problem.num_ranks, cases, schedule, seed=seed, checks="strict")


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_a_cap_fits_or_is_everybodys_error(layout: Any, short: int) -> None:
    cfg = mc.MoeConfig(**BASE, layout=layout, in_flight=2, replicas=2)
    problem = Problem(cfg, 4, None, 5, 2, skew=0.2, dropped=0.2, repeated=0.2)
    cap = max(properties._need(case) for case in problem.cases()) - short
    steps: list[Case | mc.Overflow] = []
    for step in range(2):
        try:
            steps.append(problem.case(step, max_recv_tokens=cap))
        except mc.Overflow as error:
            steps.append(error)
    assert any(isinstance(step, mc.Overflow) for step in steps) == bool(short)
    for seed in range(3):
        simulate(properties._capped, 4, problem.cases(), steps, cap, seed=seed, checks="strict")


@pytest.mark.parametrize("setting", ["busy", "sender", "sparse", "replicas", "uncombined"])
def test_schedules(setting: str) -> None:
    """What finds each fault of ``test_numba_mutations.py``, over 41 seeds."""
    steps = cases("flags", setting)
    for seed in range(41 if setting == "busy" else 5):
        simulate_setting(steps, setting, seed)


@pytest.mark.parametrize("setting", ["plain", "replicas", "chain"])
def test_a_rank_that_dies_at_any_step_is_named(setting: str) -> None:
    death = roll_call._deaths(setting)
    for seed in range(6):
        assert not any(death.survivors_name(seed)), f"seed {seed}"


def test_a_silent_peer_is_named() -> None:
    cfg = mc.MoeConfig(**{**BASE, "timeout_s": 1.0})
    case = make_case(cfg, 3, 0, tokens=(9, 9, 9), dropped=0.0)
    errors = simulate(_until_timeout, 3, cfg, case)
    assert errors[1] is None
    for rank in (0, 2):
        error = errors[rank]
        assert (error.phase, error.peer, error.expected, error.seen) == ("dispatch_recv", 1, 1, 0)
    assert {errors[0].rank, errors[2].rank} <= {0, 2}


def _until_timeout(group: mc.Group, cfg: mc.MoeConfig, case: Case) -> mc.PeerTimeout | None:
    with mc.MoeComm(cfg, group) as comm:
        if group.rank == 1:
            return None
        with pytest.raises(mc.PeerTimeout) as caught:
            run_case(comm, case)
        with pytest.raises(mc.PeerTimeout):
            comm.check()
    return caught.value


def test_values_that_make_no_sense_are_reported() -> None:
    (message,) = run_threads(_bad_expert, 1, mc.MoeConfig(**BASE))
    assert "topk_idx[1, 2]=9" in message


def _bad_expert(group: mc.Group, cfg: mc.MoeConfig) -> str:
    x = np.ones((2, cfg.hidden), numpy_dtype("bfloat16"))
    with mc.MoeComm(cfg, group) as comm, pytest.raises(mc.ConfigError) as caught:
        comm.dispatch(x, np.array([[0, 1, 2], [4, 5, 9]]), np.ones((2, 3), np.float32))
    return str(caught.value)


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_counters_are_those_of_the_other_kernels(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = mc.MoeConfig(**BASE, layout=layout, replicas=2, wire="flags")
    cases = [make_case(cfg, 4, seed) for seed in range(2)]
    seen = []
    for kernels in ("cuda", "numba"):
        monkeypatch.setenv("MOECOMM_KERNELS", kernels)
        seen.append(run_threads(_counters, 4, cases))
    assert seen[0] == seen[1]


def _counters(group: mc.Group, cases: list[Case]) -> dict[str, Any]:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
        counters = dataclasses.asdict(comm.stats())
        group.barrier(60)
    return {
        name: np.asarray(value).tolist() for name, value in counters.items() if "wait" not in name
    }


def test_processes() -> None:
    assert mc.run(_in_a_process, 2, timeout_s=120) == [True, True]


def _in_a_process(group: mc.Group) -> bool:
    case = make_case(mc.MoeConfig(**BASE), group.size, 1)
    with mc.MoeComm(case.cfg, group, kernels="numba") as comm:
        run_case(comm, case)
        group.barrier(60)
        return comm.config.wire == "flags"


# ---- what goes wrong is said ---------------------------------------------------------------------
def with_file(path: Path, text: str) -> Path:
    file = path / "mine.py"
    file.write_text(f"from moecomm.kernels.numba.protocol import *\n\n\n{text}")
    return file


def run_with(kernels: Path, monkeypatch: pytest.MonkeyPatch, seeds: int = 40) -> None:
    monkeypatch.setenv("MOECOMM_KERNELS", str(kernels))
    exchange(mc.MoeConfig(**BASE, in_flight=1), 3, steps=3, seeds=range(seeds))


def test_a_report_names_lines_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(mc.__file__).parent / "kernels/numba/dispatch_send.py").read_text()
    wrong = "        store_relaxed(shared_i64(FLAGS"
    assert "        store_release(shared_i64(FLAGS" in text
    mine = tmp_path / "dispatch_send.py"
    mine.write_text(text.replace("        store_release(shared_i64(FLAGS", wrong))
    with pytest.raises(CheckFailure) as caught:
        run_with(mine, monkeypatch)
    report = caught.value.report
    assert "is not ordered after the write of it" in report
    assert "at placement.py:" in report or "at dispatch_recv.py:" in report
    assert "dispatch_send.py:" in report


def test_an_assertion_in_a_kernel_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = with_file(
        tmp_path,
        "def sent_word(a: Args) -> int:\n"
        "    assert a.slot > 0\n"
        "    return a.local + LOC_EPOCH + 16 * a.slot\n",
    )
    with pytest.raises(CheckFailure, match="sent_word has raised an exception") as caught:
        run_with(mine, monkeypatch, 1)
    assert caught.value.kind == "kernel error"


def test_what_numba_refuses_is_a_compile_error(tmp_path: Path) -> None:
    mine = with_file(tmp_path, "def rank_first_expert(rank: int) -> int:\n    return range(rank)\n")
    (lowered,) = lower_one(mine, "rank_first_expert")
    with pytest.raises(mc.CompileError, match="mine.py: numba does not compile rank_first_expert"):
        cpu.compile_object(lowered)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    (lowered,) = lower_one(None, "rank_first_expert")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(mc.CompileError, match=r"needs the package numba .* Run pip install numba"):
        cpu.compile_object(lowered)


def test_with_numba_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (lowered,) = lower_one(None, "rank_first_expert")
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(mc.CompileError, match="NUMBA_DISABLE_JIT is set"):
        cpu.compile_object(lowered)


def lower_one(user: Path | None, name: str) -> list[Any]:
    return [part for part in lower(read(user), "dispatch_send") if part.name == name]
