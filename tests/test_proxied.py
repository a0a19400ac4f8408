"""Ranks on several nodes, joined by a network that keeps no order: bit for bit as the reference."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from exchange import Case, compare_received, make_case, run_case, send
from fake_nic import ARRIVE_TWICE, DELAY, PENDING, REFUSE, REORDER, SILENT
from fake_transport import WILD, network, on_nodes
from hypothesis import given, note
from hypothesis import strategies as st
from payload import assert_same_bits
from problems import Problem, examples, problems
from schedules import Action, for_rank, random_schedule, walk
from test_properties import _capped, _need
from threads import run_threads

import moecomm as mc

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=24, max_tokens=6, layout="grouped", wire="flags", timeout_s=20.0
)


def _walk(group: mc.Group, cases: list[Case], schedule: list[Action]) -> bool:
    """Whether there was a mover."""
    with mc.MoeComm(cases[0].cfg, group, "fake") as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        mover = comm._runtime._mover
        group.barrier(60)
        assert mover is None or mover.strange == 0
        return mover is not None


@examples(10)
@given(
    problem=problems(max_ranks=8, max_steps=3),
    node_size=st.sampled_from([1, 1, 2, 4]),
    num_nics=st.integers(1, 2),
    bounce=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_problem_equals_the_reference(
    problem: Problem, node_size: int, num_nics: int, bounce: bool, seed: int
) -> None:
    """All layouts, 1 to 8 ranks, replicas on any nodes, handles in flight in any order, some
    closed without being combined."""
    schedule = random_schedule(problem.rng, problem.num_steps, problem.cfg.in_flight, closed=0.2)
    note(f"schedule {schedule}")
    fields = {"num_nics": num_nics, "bounce": bounce, "seed": seed}
    on_nodes(_walk, problem.num_ranks, node_size, problem.cases(), schedule, **fields)


@examples(4)
@given(problem=problems(max_ranks=4, max_steps=3), data=st.data())
def test_a_cap_fits_or_is_everybodys_error(problem: Problem, data: st.DataObject) -> None:
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

    def work(group: mc.Group) -> None:
        group.transport = "fake"
        _capped(group, inputs, steps, cap)

    on_nodes(work, problem.num_ranks, 1, bounce=data.draw(st.booleans()))


@pytest.mark.usefixtures("either_way")
def test_replicas_on_different_nodes() -> None:
    """Each replica sends its share of the records, on nodes of 1, 2 and 4 ranks."""
    for node_size, replicas in ((1, 2), (2, 2), (2, 4), (4, 2)):
        cfg = dataclasses.replace(SMALL, replicas=replicas)
        cases = [make_case(cfg, 8, step) for step in range(3)]
        schedule = random_schedule(np.random.default_rng(node_size), 6, cfg.in_flight)
        on_nodes(_walk, 8, node_size, cases, schedule)


@pytest.mark.usefixtures("either_way")
def test_a_thousand_random_steps() -> None:
    """Changing tokens, none included, skewed and even routing, two handles in flight, some closed;
    epochs go past what an immediate holds of them (see the mover's own tests for 13 bits)."""
    cfg = dataclasses.replace(SMALL, hidden=8, max_tokens=3)
    cases = [make_case(cfg, 2, step, skew=0.5 * (step % 3)) for step in range(24)]
    schedule = random_schedule(np.random.default_rng(5), 1000, cfg.in_flight, closed=0.2)
    on_nodes(_walk, 2, 1, cases, schedule)


@pytest.mark.parametrize(("num_ranks", "node_size"), [(6, 1), (8, 3)])
def test_two_thousand_steps_of_replicas_with_two_nics(num_ranks: int, node_size: int) -> None:
    """A thousand each, of pairs of replicas that are not on one node, or not all of them."""
    cfg = dataclasses.replace(SMALL, hidden=8, max_tokens=3, replicas=2)
    cases = [make_case(cfg, num_ranks, step, skew=0.5 * (step % 3)) for step in range(24)]
    schedule = random_schedule(np.random.default_rng(7), 1000, cfg.in_flight, closed=0.2)
    on_nodes(_walk, num_ranks, node_size, cases, schedule, num_nics=2)


@pytest.mark.usefixtures("either_way")
def test_arrivals_that_come_twice_change_nothing() -> None:
    """What a mover stores only grows; so it need not tell a second one from the first."""
    cases = [make_case(SMALL, 4, step) for step in range(6)]
    schedule = random_schedule(np.random.default_rng(6), 100, SMALL.in_flight, closed=0.2)
    on_nodes(_walk, 4, 1, cases, schedule, words={**WILD, ARRIVE_TWICE: 3})


def test_c11_a_queue_of_two_and_a_slow_network() -> None:
    """A send queue that is nearly always full, to a network that rarely moves: exact, and no queue
    overruns."""
    cases = [make_case(SMALL, 4, step) for step in range(3)]
    schedule = random_schedule(np.random.default_rng(3), 9, SMALL.in_flight)
    slow = {REORDER: 1, DELAY: 40, REFUSE: 3}
    on_nodes(_walk, 4, 1, cases, schedule, depth=2, words=slow)


def test_c12_a_slow_link_holds_nobody_else_up() -> None:
    """Nothing gets from rank 0 to rank 2 for a while. Both others receive and send back all steps
    that may be in flight; rank 2 does so afterwards, and all finish."""
    cfg = dataclasses.replace(SMALL, in_flight=3)
    cases = [make_case(cfg, 3, n, tokens=(6, 6, 6), dropped=0.0) for n in range(3)]

    def work(group: mc.Group) -> None:
        rank = group.rank
        with mc.MoeComm(cfg, group, "fake") as comm:
            run_case(comm, cases[0])
            group.barrier()
            if rank == 0:
                net.set(0, SILENT, 1 << 2)
            group.barrier()
            handles = [send(comm, case) for case in cases]
            if rank != 2:
                half_way(comm, handles)
            group.barrier(15)
            if rank == 0:
                assert net.get(0, PENDING) >= len(cases)
                net.set(0, SILENT, 0)
            if rank == 2:
                half_way(comm, handles)
            for case, handle in zip(cases, handles, strict=True):
                out = comm.combine_recv(handle, case.weights[rank])
                assert_same_bits(out, case.outs[rank], f"rank {rank}: out")
            group.barrier()

    def half_way(comm: mc.MoeComm, handles: list[mc.Handle]) -> None:
        for case, handle in zip(cases, handles, strict=True):
            compare_received(case, comm.group.rank, comm.dispatch_recv(handle))
            comm.combine_send(case.ys[comm.group.rank], handle)

    with network(3, 1) as net:
        run_threads(work, 3)
        net.check_promises()


def test_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one node: no interface is opened, and small batches go as lines."""
    monkeypatch.setattr("fake_transport.open_engine", None)
    cases = [make_case(dataclasses.replace(SMALL, wire="auto"), 3, step) for step in range(2)]
    assert (
        on_nodes(_walk, 3, 3, cases, random_schedule(np.random.default_rng(0), 2, 2)) == [False] * 3
    )


def test_c13_several_communicators_made_and_used_with_skew() -> None:
    """An engine each: steps of three layers take turns, ranks are late at random, also in opening
    and closing, and one layer is closed before the others."""
    layouts = [{}, {"layout": "rank"}, {"layout": "batched", "reduce": "sender"}]
    configs = [dataclasses.replace(SMALL, **changes) for changes in layouts]

    def work(group: mc.Group) -> None:
        own = np.random.default_rng(group.rank)

        def pause() -> None:
            if own.random() < 0.3:
                time.sleep(own.exponential(0.002))

        comms = []
        for cfg in configs:
            time.sleep(own.exponential(0.02))
            comms.append(mc.MoeComm(cfg, group, "efa"))
        for step in range(6):
            if step == 3:
                comms.pop(0).close()
            for comm in comms:
                cases = [make_case(comm.config, 3, 10 * step + n) for n in range(3)]
                schedule = random_schedule(np.random.default_rng(step), 4, 2, closed=0.2)
                walk(comm, cases, for_rank(schedule, own), pause=pause)
        for comm in comms:
            time.sleep(own.exponential(0.02))
            comm.close()

    on_nodes(work, 3, 1)
