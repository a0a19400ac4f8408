"""Ranks on several nodes, joined by a network that keeps no order: bit for bit as the reference,
with exactly the writes that docs/protocol.md says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, run_case
from fake_nic import DELAY, REFUSE, REORDER
from fake_transport import on_nodes
from hypothesis import given, note
from hypothesis import strategies as st
from problems import Problem, examples, problems
from schedules import Action, for_rank, random_schedule, walk
from test_properties import _capped, _need

import moecomm as mc
from moecomm.layout import Layout
from moecomm.remote import Remote

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=24, max_tokens=6, layout="grouped", wire="flags", timeout_s=20.0
)


def _walk(group: mc.Group, cases: list[Case], schedule: list[Action]) -> Any:
    with mc.MoeComm(cases[0].cfg, group, "fake") as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        mover = comm._runtime._mover
        group.barrier(60)
        if mover is None:
            return None
        mover.close()  # everything has gone; what is counted is final
        assert mover.strange == 0
        return mover.counters()


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


def test_c11_c12_a_queue_of_two_and_a_slow_network() -> None:
    """A send queue that is nearly always full, to a network that rarely moves: exact, and no queue
    overruns."""
    cases = [make_case(SMALL, 4, step) for step in range(3)]
    schedule = random_schedule(np.random.default_rng(3), 9, SMALL.in_flight)
    slow = {REORDER: 1, DELAY: 40, REFUSE: 3}
    on_nodes(_walk, 4, 1, cases, schedule, depth=2, words=slow)


# ---- the model: which writes there are --------------------------------------------------------


def _expected(case: Case, me: int, peers: list[int], remote: Remote) -> dict[str, list[int]]:
    """Writes and bytes of one exchange, from the routing alone."""
    cfg = case.cfg
    layout = Layout(cfg, case.num_ranks, me, remote)
    areas = layout.areas
    assert areas is not None
    found = {kind: [0, 0] for kind in ("head", "private", "records", "rows")}

    def add(kind: str, nbytes: int) -> None:
        found[kind][0] += 1
        found[kind][1] += nbytes

    for peer in peers:
        hosted = set(layout.expert_range(peer))
        wanted = [hosted & set(row.tolist()) for row in case.idxs[me]]
        share = [bool(w) for t, w in enumerate(wanted) if t % cfg.replicas == me % cfg.replicas]
        records = sum(share)
        add("head", areas.head_bytes)
        if records:
            add("private", min(records, remote.private_records) * areas.record_bytes)
        if records > remote.private_records:
            add("records", (records - remote.private_records) * areas.record_bytes)
        mine = set(layout.expert_range(me))
        owed = [len(mine & set(row.tolist())) for row in case.idxs[peer]]
        rows = sum(map(bool, owed)) if layout.rows_per_rank else sum(owed)
        add("rows", rows * areas.row_bytes)
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"reduce": "sender"}, {"layout": "rank"}, {"replicas": 2}],
    ids=["grouped", "sender", "rank", "replicas"],
)
@pytest.mark.parametrize("node_size", [1, 2])
@pytest.mark.parametrize("bounce", [False, True], ids=["straight", "bounce"])
def test_writes_are_those_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch, bounce: bool, node_size: int, changes: dict[str, Any]
) -> None:
    """One head and one row write to every remote peer, one private write and one of the rest where
    there are records; nothing else, and not a byte more."""
    remote = Remote(mode="proxied", private_records=2, bounce=bounce)
    monkeypatch.setattr("moecomm.runtime.proxied.Remote", lambda **_: remote)
    cfg = dataclasses.replace(SMALL, **changes)
    cases = [make_case(cfg, 4, step, skew=0.3 * step) for step in range(4)]
    cases.append(make_case(cfg, 4, 9, tokens=[0, 6, 0, 3][: 4 // cfg.replicas]))
    schedule = random_schedule(np.random.default_rng(1), len(cases), cfg.in_flight)
    for me, counted in enumerate(on_nodes(_walk, 4, node_size, cases, schedule)):
        peers = [p for p in range(4) if p // node_size != me // node_size]
        wanted = [_expected(case, me, peers, remote) for case in cases]
        for kind in ("head", "private", "records", "rows"):
            total = [sum(w[kind][n] for w in wanted) for n in (0, 1)]
            assert list(counted[kind][:2]) == total, (me, kind)
        assert counted["ack"][0] == counted["abort"][0] == 0
        assert counted["leave"][0] <= len(peers)  # not to those that have left


def test_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one node: no interface is opened, and small batches go as lines."""
    monkeypatch.setattr("fake_transport.open_engine", None)
    cases = [make_case(dataclasses.replace(SMALL, wire="auto"), 3, step) for step in range(2)]
    assert (
        on_nodes(_walk, 3, 3, cases, random_schedule(np.random.default_rng(0), 2, 2)) == [None] * 3
    )


def test_several_communicators_at_once() -> None:
    """An engine each: steps of two layers take turns, and one is closed before the other."""
    cases = [make_case(SMALL, 2, step) for step in range(2)]

    def work(group: mc.Group) -> None:
        first = mc.MoeComm(SMALL, group, "efa")
        with mc.MoeComm(SMALL, group, "efa") as second:
            for _ in range(3):
                run_case(first, cases[0])
                run_case(second, cases[1])
            first.close()
            run_case(second, cases[0])

    on_nodes(work, 2, 1)
