"""Dispatch and combine against the reference, bit for bit, over random problems.

Ranks live in one simulation: its seed decides who runs when, down to single threads of kernels,
and it checks every access. ``MOECOMM_TEST_EXAMPLES=N`` tries N problems instead of the usual few.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np
import pytest
from exchange import Case, compare_received, finish, send
from guards import check_gaps, check_unused_rows
from hypothesis import given, note
from hypothesis import strategies as st
from problems import Problem, examples, problems
from schedules import Action, for_rank, random_schedule, walk
from threads import run_threads

import moecomm as mc
from moecomm.emulator import simulate

pytestmark = pytest.mark.usefixtures("poisoned")


@examples(200)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_any_problem_equals_the_reference(problem: Problem, seed: int) -> None:
    """All layouts, 1 to 9 ranks, replicas, dtypes, alignments; skewed, empty and repeated routing;
    handles in flight, received in any order, some closed without being combined."""
    cases = problem.cases()
    schedule = random_schedule(problem.rng, problem.num_steps, problem.cfg.in_flight, closed=0.2)
    note(f"schedule {schedule}")
    simulate(_walk, problem.num_ranks, cases, schedule, seed=seed, checks="strict")


def _walk(group: mc.Group, cases: list[Case], schedule: list[Action]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        check_gaps(comm)
        group.barrier(60)


@examples(80)
@given(problem=problems(max_ranks=6, max_steps=3), seed=st.integers(0, 2**16), short=st.data())
def test_a13_any_cap_fits_or_is_everybodys_error(problem: Problem, seed: int, short: Any) -> None:
    """The error names who would get how much; nothing is written where it must not be, and the
    other handles in flight are as they would have been."""
    sizes = [_need(problem.case(step)) for step in range(problem.num_steps)]
    cap = max(
        1, short.draw(st.sampled_from(sizes), "need") - short.draw(st.integers(0, 2), "short")
    )
    changes = {"max_recv_tokens": cap, "in_flight": problem.num_steps}
    steps: list[Case | mc.Overflow] = []
    for step in range(problem.num_steps):
        try:
            steps.append(problem.case(step, **changes))
        except mc.Overflow as error:
            steps.append(error)
    inputs = [problem.case(step, in_flight=problem.num_steps) for step in range(problem.num_steps)]
    note(f"cap {cap}, needs {sizes}")
    simulate(_capped, problem.num_ranks, inputs, steps, cap, seed=seed, checks="strict")


def _need(case: Case) -> int:
    """The cap that is just enough."""
    if case.cfg.layout == "batched":
        return max(int(r.counts.max(initial=0)) for r in case.recv)
    return max(int(r.num_rows[0]) for r in case.recv)


def _capped(group: mc.Group, inputs: list[Case], steps: list[Case | mc.Overflow], cap: int) -> None:
    cfg = dataclasses.replace(inputs[0].cfg, max_recv_tokens=cap)
    with mc.MoeComm(cfg, group) as comm:
        handles = [send(comm, case) for case in inputs]
        for handle, step in zip(handles, steps, strict=True):
            if isinstance(step, mc.Overflow):
                with pytest.raises(mc.Overflow) as caught:
                    comm.dispatch_recv(handle)
                assert vars(caught.value) == vars(step)
                check_unused_rows(comm, None, handle.slot)
            else:
                recv = comm.dispatch_recv(handle)
                compare_received(step, group.rank, recv)
                check_unused_rows(comm, step, handle.slot)
                finish(comm, step, recv)
        check_gaps(comm)
        group.barrier(60)


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_d01_two_hundred_steps_with_changing_tokens(layout: str) -> None:
    """No barrier anywhere: what a rank may overwrite is what its peers have acknowledged."""
    fields = {"layout": layout, "num_experts": 7, "top_k": 3, "hidden": 24, "max_tokens": 5}
    cfg = mc.MoeConfig(**fields, in_flight=3)
    problem = Problem(cfg, 3, None, 1, 24, skew=0.1, dropped=0.2, repeated=0.2)
    schedule = random_schedule(problem.rng, 200, cfg.in_flight, closed=0.1)
    for seed in range(1, 1 + int(os.environ.get("MOECOMM_TEST_EXAMPLES", "10")) // 10):
        simulate(_walk, 3, problem.cases(), schedule, seed=seed)


@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_d01_two_hundred_steps_with_random_delays(reduce: Any) -> None:
    """Ranks as threads over real memory, each late at random before a tenth of its calls."""
    cfg = mc.MoeConfig(
        num_experts=9, top_k=4, hidden=40, max_tokens=6, reduce=reduce, in_flight=2, timeout_s=30
    )
    problem = Problem(cfg, 4, None, 2, 24, skew=0.2, dropped=0.2, repeated=0.2)
    schedule = random_schedule(problem.rng, 200, cfg.in_flight, closed=0.1)
    run_threads(_late_walk, 4, problem.cases(), schedule)


def _late_walk(group: mc.Group, cases: list[Case], schedule: list[Action]) -> None:
    own = np.random.default_rng(group.rank)

    def pause() -> None:
        if own.random() < 0.1:
            time.sleep(own.exponential(0.002))

    with mc.MoeComm(cases[0].cfg, group) as comm:
        walk(comm, cases, for_rank(schedule, own), pause=pause)
        group.barrier(60)
