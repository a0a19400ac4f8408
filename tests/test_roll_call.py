"""Who is named when a rank dies: that rank, on all others, wherever in a step it happens.

A rank that got the dead one's last words waits for the ranks that did not. What keeps it from
naming them is the roll-call of ``waits.cuh``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from exchange import Case, compare_received, finish, make_case, send
from mutations import SEEDS, Mutation, Search, first_failure, mutate, searching

import moecomm as mc
from moecomm.emulator import Faults, simulate

pytestmark = pytest.mark.usefixtures("poisoned")

TIMEOUT_S = 1.0
CFG = mc.MoeConfig(
    num_experts=6, top_k=2, hidden=16, max_tokens=4, in_flight=1, timeout_s=TIMEOUT_S, wire="flags"
)


@dataclass(frozen=True)
class Death:
    """``dead``: which rank; ``None``: any. It dies within its first ``turns``."""

    cases: list[Case]
    dead: int | None
    turns: int

    def survivors_name(self, seed: int) -> list[int]:
        """Whom the others name, as differences from the rank that died."""
        rng = np.random.default_rng(seed)
        ranks = self.cases[0].num_ranks
        dead = int(rng.integers(ranks)) if self.dead is None else self.dead
        faults = Faults(dead_rank=dead, dead_after_steps=int(rng.integers(100, self.turns)))
        ends = simulate(
            _until_timeout, ranks, self.cases, seed, seed=seed, checks=False, faults=faults
        )
        assert ends[dead] is None
        return [named - dead for rank, named in enumerate(ends) if rank != dead]


def _deaths(setting: str, wire: Any = "flags") -> Death:
    cfg = dataclasses.replace(CFG, wire=wire)
    if setting == "chain":  # 0 waits for 2 alone, which waits for 1
        cfg = dataclasses.replace(cfg, top_k=1, max_tokens=12)
        idxs = [np.full((12, 1), expert, np.int32) for expert in (4, 5, 0)]
        return Death([make_case(cfg, 3, step, idxs=idxs) for step in range(3)], 1, 4000)
    replicas, ranks = (2, 4) if setting == "replicas" else (1, 3)
    cfg = dataclasses.replace(cfg, replicas=replicas)
    cases = [make_case(cfg, ranks, step, dropped=0.0, repeated=0.0) for step in range(3)]
    return Death(cases, None, 8000)


@pytest.mark.parametrize("setting", ["plain", "replicas", "chain"])
@pytest.mark.parametrize("wire", ["flags", "lines"])
def test_c02_a_rank_that_dies_at_any_step(wire: Any, setting: str) -> None:
    """The others get right results, then PeerTimeout within its time, and nothing hangs. It names
    the dead rank on all of them: never one that itself waits, nor another replica of its group."""
    death = _deaths(setting, wire)
    for seed in range(int(os.environ.get("MOECOMM_TEST_EXAMPLES", SEEDS))):
        assert not any(death.survivors_name(seed)), f"seed {seed}"


@pytest.mark.parametrize("wire", ["flags", "lines"])
def test_a_rank_that_comes_amid_the_roll_call_is_late(wire: Any) -> None:
    """It is in time for everybody, or for nobody; and a roll that was called in vain would cut the
    next waits short."""
    ends = [_late(wire, seed) for seed in range(20)]
    assert all(one in IN_TIME_OR_LATE for one in ends), ends
    assert IN_TIME_OR_LATE[1] in ends


@pytest.mark.parametrize("wire", ["flags", "lines"])
def test_of_rows_waited_for_together_the_late_one_is_named(wire: Any) -> None:
    """Not the other one, which came in time, before it in the token's row or after it."""
    ends = [end for seed in range(20) for end in _late(wire, seed, "combine")]
    assert {end and end[0] for end in ends} == {1}


IN_TIME_OR_LATE = [None] * 3, [(1, 2)] * 3  # who was late on each rank, and in which step


def _late(wire: Any, seed: int, half: str = "dispatch") -> list[tuple[int, int] | None]:
    cfg = dataclasses.replace(CFG, wire=wire)
    # Every token goes to rank 1, and to another rank before or after it.
    idxs = [np.array([[0, 2], [2, 4], [1, 3], [3, 5]], np.int32)] * 3
    cases = [make_case(cfg, 3, step, idxs=idxs) for step in range(3)]
    return simulate(_come_late, 3, cases, half, seed=seed, checks=False)


def _come_late(group: mc.Group, cases: list[Case], half: str) -> tuple[int, int] | None:
    """Rank 1 is just too late, and then late again, but in time."""
    with mc.MoeComm(cases[0].cfg, group) as comm:
        try:
            for step, sleep_s in enumerate((0.0, 1.1, 0.9)):
                slept = sleep_s * TIMEOUT_S if group.rank == 1 else 0.0
                _sleep(group, slept if half == "dispatch" else 0.0)
                recv = comm.dispatch_recv(send(comm, cases[step]))
                compare_received(cases[step], group.rank, recv)
                _sleep(group, slept if half == "combine" else 0.0)
                finish(comm, cases[step], recv)
        except mc.PeerTimeout as error:
            return error.peer, error.epoch or 0
    return None


MUTATIONS = {
    "nobody-answers": Mutation(
        "waits.cuh",
        "if (now - start > a.timeout_ns || roll_called(a)) answer_roll",
        "if (now - start > a.timeout_ns) answer_roll",
        setting="chain",
    ),
    "answers-go-to-nobody": Mutation(
        "waits.cuh",
        "st_relaxed_sys(roll_word(peer_base(a, r), 1 + a.rank), 1ull);",
        "",
        setting="chain",
    ),
    "named-before-there-was-time-to-answer": Mutation(
        "waits.cuh", "max(start, answered) + grace", "answered", setting="chain"
    ),
    "late-and-taken": Mutation(
        "waits.cuh", "late = came && too_late(a, start)", "late = false", setting="late"
    ),
    "the-first-replica-is-named": Mutation(
        "waits.cuh",
        "culprit == NUM_RANKS ? suspect(a, who) : culprit",
        "who.peer",
        setting="replicas",
    ),
}


@pytest.fixture(scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[Search]:
    yield from searching(request, _look, {name: (fault,) for name, fault in MUTATIONS.items()})


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_roll_call_that_is_wrong_names_somebody_else(name: str, search: Search) -> None:
    assert search[name] is not None


def _look(mutation: Mutation) -> str | None:
    mutate(mutation)
    return first_failure(partial(_check_names, mutation.setting), range(SEEDS), AssertionError)


def _check_names(setting: str, seed: int) -> None:
    if setting == "late":
        assert _late("flags", seed) in IN_TIME_OR_LATE
    else:
        assert not any(_deaths(setting).survivors_name(seed))


def _until_timeout(group: mc.Group, cases: list[Case], seed: int) -> int:
    rng = np.random.default_rng([seed, group.rank])
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for step in range(1000):
            try:
                _late_step(comm, cases[step % len(cases)], rng)
            except mc.PeerTimeout as error:
                return error.peer
    raise AssertionError("a thousand steps without the dead rank")


def _late_step(comm: mc.MoeComm, case: Case, rng: np.random.Generator) -> None:
    """Some begin to wait long after others do, for whom they wait."""
    started = comm.group.simulation.time_ns
    slept = rng.uniform(0, 0.6 * TIMEOUT_S)
    try:
        handle = send(comm, case)
        _sleep(comm.group, slept)
        recv = comm.dispatch_recv(handle)
        compare_received(case, comm.group.rank, recv)
        finish(comm, case, recv)
    finally:
        # At most one whole wait and the roll-call, after others that were nearly as long.
        waited = (comm.group.simulation.time_ns - started) / 1e9 - slept
        assert waited < 3 * TIMEOUT_S


def _sleep(group: mc.Group, seconds: float) -> None:
    """In the simulation's time."""
    with pytest.raises(TimeoutError):
        group.simulation.store(group.rank).get("nobody sets this", seconds)
