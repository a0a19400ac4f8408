"""Ranks that cannot store to each other: proxied, with a mover that is a kernel of the test, and
with NVSHMEM's puts as the emulator has them. Bit for bit as the reference, whoever runs when."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from exchange import Case, finish, make_case, run_case, send
from hypothesis import given, note
from hypothesis import strategies as st
from problems import Problem, examples, problems
from remote import World, pretend, served, simulate_remote
from schedules import Action, for_rank, random_schedule, walk
from test_properties import _capped, _need

import moecomm as mc
from moecomm import layout
from moecomm.emulator import Faults
from moecomm.remote import Remote

pytestmark = pytest.mark.usefixtures("poisoned")
MODES = ("proxied", "bounce", "nvshmem")


@st.composite
def worlds(draw: Any, num_ranks: int, mode: str) -> World:
    """Ranks on nodes of any kind: apart, alone, together."""
    nodes = [draw(st.integers(0, num_ranks - 1)) for _ in range(num_ranks)]
    if draw(st.booleans()):
        nodes = list(range(num_ranks))
    sizes = {"private_records": draw(st.integers(1, 4)), "chunk": draw(st.integers(1, 4))}
    return World(served(mode, **sizes), nodes)


@pytest.mark.parametrize("mode", MODES)
@examples(24)
@given(problem=problems(max_ranks=8, max_steps=3), seed=st.integers(0, 2**16), data=st.data())
def test_any_problem_equals_the_reference(
    mode: str, problem: Problem, seed: int, data: st.DataObject
) -> None:
    """All layouts, 1 to 8 ranks on any nodes, replicas of which some are within reach, handles in
    flight in any order, some closed without being combined."""
    world = data.draw(worlds(problem.num_ranks, mode))
    cases = problem.cases()
    schedule = random_schedule(problem.rng, problem.num_steps, problem.cfg.in_flight, closed=0.2)
    note(f"nodes {world.nodes}, {world.remote}, schedule {schedule}")
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, world)
        simulate_remote(world, _walk, cases, schedule, seed=seed)


def _walk(group: mc.Group, cases: list[Case], schedule: list[Action]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        group.barrier(60)


@pytest.mark.parametrize("mode", MODES)
@examples(12)
@given(problem=problems(max_ranks=4, max_steps=3), seed=st.integers(0, 2**16), data=st.data())
def test_a_cap_fits_or_is_everybodys_error(
    mode: str, problem: Problem, seed: int, data: st.DataObject
) -> None:
    world = data.draw(worlds(problem.num_ranks, mode))
    sizes = [_need(problem.case(step)) for step in range(problem.num_steps)]
    cap = max(1, data.draw(st.sampled_from(sizes)) - data.draw(st.integers(0, 2)))
    flight = {"in_flight": problem.num_steps}
    steps: list[Case | mc.Overflow] = []
    for step in range(problem.num_steps):
        try:
            steps.append(problem.case(step, max_recv_tokens=cap, **flight))
        except mc.Overflow as error:
            steps.append(error)
    inputs = [problem.case(step, **flight) for step in range(problem.num_steps)]
    note(f"nodes {world.nodes}, {world.remote}, cap {cap}, needs {sizes}")
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, world)
        simulate_remote(world, _capped, inputs, steps, cap, seed=seed)


BUSY = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=104, max_tokens=13, layout="grouped", in_flight=1, timeout_s=1.0
)


@pytest.mark.parametrize(("mode", "replicas"), [("proxied", 1), ("bounce", 1), ("nvshmem", 2)])
def test_every_schedule_of_a_busy_step(
    monkeypatch: pytest.MonkeyPatch, mode: Any, replicas: int
) -> None:
    """More records than are private, more than a chunk, slots used again, on 40 schedules."""
    cfg = dataclasses.replace(BUSY, replicas=replicas)
    world = World(served(mode, private_records=3, chunk=3), [0, 1, 0, 1])
    cases = [make_case(cfg, 4, step) for step in range(3)]
    pretend(monkeypatch, world)
    for seed in range(40):
        simulate_remote(world, _run, cases, seed=seed)


@pytest.mark.parametrize("reduce", ["receiver", "sender"])
@pytest.mark.parametrize(("mode", "replicas"), [("proxied", 2), ("bounce", 2), ("nvshmem", 1)])
def test_counting_that_is_divided_among_blocks(
    monkeypatch: pytest.MonkeyPatch, mode: Any, replicas: int, reduce: Any
) -> None:
    """As in batches of more than 512 tokens."""
    monkeypatch.setattr(layout, "UNDIVIDED_TOKENS", 4)
    monkeypatch.setattr(layout, "LEAST_CHUNK", 4)
    cfg = dataclasses.replace(BUSY, replicas=replicas, reduce=reduce)
    world = World(served(mode, private_records=3, chunk=3), [0, 1, 0, 1])
    cases = [make_case(cfg, 4, step) for step in range(2)]
    pretend(monkeypatch, world)
    for seed in range(40):
        simulate_remote(world, _run, cases, seed=seed)


@pytest.mark.parametrize(("beside", "in_flight"), [("together", 1), ("together", 2), ("late", 2)])
def test_push_and_pull_on_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, beside: str, in_flight: int
) -> None:
    """Push beside whatever comes next; pull beside the stage that waits for it, or whenever it
    likes, also when its handle has long been closed: what it reads then may change, for nothing."""
    cfg = dataclasses.replace(BUSY, replicas=2, in_flight=in_flight)
    world = World(served("bounce", private_records=3), [0, 1, 0, 1], beside)
    cases = [make_case(cfg, 4, step) for step in range(3)]
    closed = 0.3 if beside == "late" else 0.0
    schedule = random_schedule(np.random.default_rng(4), 9, in_flight, closed=closed)
    pretend(monkeypatch, world)
    for seed in range(10):
        checks = "strict" if beside == "together" else False
        simulate_remote(world, _walk, cases, schedule, seed=seed, checks=checks)


@pytest.mark.parametrize("mode", MODES)
def test_stores_that_arrive_late_and_out_of_order(monkeypatch: Any, mode: Any) -> None:
    world = World(served(mode, private_records=3, chunk=3), [0, 1, 1])
    cases = [make_case(BUSY, 3, step) for step in range(3)]
    pretend(monkeypatch, world)
    for seed in range(1, 11):
        faults = Faults(delay_stores=True)
        simulate_remote(world, _run, cases, seed=seed, checks=False, faults=faults)


def _run(group: mc.Group, cases: list[Case]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
        group.barrier(60)


@pytest.mark.parametrize("mode", MODES)
def test_many_steps_without_tokens_here_and_there(monkeypatch: Any, mode: Any) -> None:
    """Ranks that send or get nothing still acknowledge, and need not be waited for."""
    world = World(served(mode, private_records=2, chunk=2), [0, 1, 2])
    counts = [[0, 0, 0], [4, 0, 0], [0, 13, 1], [13, 0, 4], [0, 0, 0], [1, 2, 3]]
    cases = [make_case(BUSY, 3, step, tokens=tokens) for step, tokens in enumerate(counts)]
    pretend(monkeypatch, world)
    for seed in range(4):
        simulate_remote(world, _run, cases * 2, seed=seed)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_who_owes_nothing_may_close(monkeypatch: Any, mode: Any, last: bool) -> None:
    """Rank 1 gets nothing, and closes its handles, also when the others have all their rows."""
    world = World(served(mode, private_records=3), [0, 1, 2])
    idxs = [np.full((4, 3), 0), np.full((6, 3), 6), np.empty((0, 3))]
    idxs = [idx.astype(np.int32) for idx in idxs]
    cases = [make_case(BUSY, 3, step, idxs=idxs) for step in range(3)]
    pretend(monkeypatch, world)
    for seed in range(4):
        simulate_remote(world, _close_on_rank_1, cases, last, seed=seed)


def _close_on_rank_1(group: mc.Group, cases: list[Case], last: bool) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            recv = comm.dispatch_recv(send(comm, case))
            if group.rank != 1:
                finish(comm, case, recv)
            if last:
                group.barrier(60)
            if group.rank == 1:
                recv.handle.close()
        group.barrier(60)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_dies_is_named_on_every_node(monkeypatch: Any, mode: Any) -> None:
    """Whoever notices first tells the others, those on other nodes by their mover."""
    cfg = dataclasses.replace(BUSY, hidden=16)
    world = World(served(mode, private_records=2, chunk=2), [0, 1, 1])
    cases = [make_case(cfg, 3, step) for step in range(3)]
    pretend(monkeypatch, world)
    for seed in range(12):
        turns = int(np.random.default_rng(seed).integers(100, 8000))
        faults = Faults(dead_rank=1, dead_after_steps=turns)
        ends = simulate_remote(world, _until_timeout, cases, seed=seed, checks=False, faults=faults)
        assert ends[1] is None
        assert (ends[0], ends[2]) == (1, 1), f"seed {seed}"


def _until_timeout(group: mc.Group, cases: list[Case]) -> int:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for step in range(1000):
            started = group.simulation.time_ns
            try:
                run_case(comm, cases[step % len(cases)])
            except mc.PeerTimeout as error:
                waited = (group.simulation.time_ns - started) / 1e9
                assert waited < 3 * comm.config.timeout_s
                return error.peer
    raise AssertionError("a thousand steps without the dead rank")


def test_lines_need_peers_within_reach() -> None:
    cfg = dataclasses.replace(BUSY, wire="lines")
    with pytest.raises(mc.ConfigError, match="wire='lines'"):
        mc.Layout(cfg, 2, 0, Remote(mode="proxied"))  # noqa: B018
    assert not mc.Layout(BUSY, 2, 0, Remote(mode="proxied")).lines


@pytest.mark.parametrize(
    ("field", "value"), [("mode", "magic"), ("private_records", 0), ("chunk", 0), ("chunk", 1.5)]
)
def test_a_bad_plan_is_refused(field: str, value: Any) -> None:
    with pytest.raises(mc.ConfigError, match=f"{field}={value!r}"):
        Remote(**{"mode": "proxied", field: value})
