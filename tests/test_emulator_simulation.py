"""Simulations: repeatable schedules, virtual time, hangs that are reported, host code, faults."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from emulator_programs import program
from emulator_ring import Ring

from moecomm.emulator import Deadlock, Faults, Simulation, fuzz, simulate
from moecomm.errors import ConfigError, PeerTimeout, StateError


# ---- schedules ---------------------------------------------------------------------------------
def _order(seed: int, checks: bool) -> list[int]:
    ring = Ring(2)
    ring.out = np.zeros((2, 64 * 4), np.uint64)

    def body(group: Any) -> None:
        ring.launch(group, "order")
        group.barrier()
        ring.launch(group, "order")

    simulate(body, 2, seed=seed, checks=checks)
    assert sorted(ring.out.ravel()) == list(range(512, 1024))
    return [int(v) for v in ring.out.ravel()]


@pytest.mark.parametrize("checks", [False, True])
def test_a_seed_is_one_schedule(checks: bool) -> None:
    orders = {seed: _order(seed, checks) for seed in range(6)}
    for seed, order in orders.items():
        assert _order(seed, checks) == order
    assert len({tuple(order) for order in orders.values()}) == 6


def test_the_fair_schedule_runs_each_thread_until_it_waits() -> None:
    order = np.array(_order(0, False)).reshape(2, 64, 4)
    assert (np.diff(order, axis=2) == 1).all()


def test_results_come_back_by_rank() -> None:
    ring = Ring(3)
    assert simulate(lambda group: (group.rank, group.size), 3) == [(0, 3), (1, 3), (2, 3)]
    results = simulate(ring.step, 3, seed=5)
    for came, _, *sums in results:
        assert came == 1
        assert sums[:2] == ring.sums


def test_fuzz_names_the_seed_that_fails() -> None:
    seen: list[int] = []

    def body(group: Any) -> None:
        seen.append(group.simulation.seed)
        if group.simulation.seed == 3:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        fuzz(body, 1, seeds=range(10))
    assert seen == [0, 1, 2, 3]
    assert caught.value.__notes__ == ["rank 0 of 1 in a simulation, seed 3"]


# ---- time and hangs ----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_timeout_of_half_a_minute_costs_no_time(seed: int) -> None:
    ring = Ring(2)

    def body(group: Any) -> list[int]:
        if group.rank == 1:
            return []
        return ring.step_alone(group, "ring", timeout_s=30.0)

    begin = time.monotonic()
    came, waited, *_ = simulate(body, 2, seed=seed)[0]
    assert not came
    assert 30e9 < waited < 45e9
    assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize("seed", [0, 7])
def test_a_wait_without_end_is_reported(seed: int) -> None:
    ring = Ring(3)

    def body(group: Any) -> None:
        if group.rank != 1:
            ring.step_alone(group, "ring")

    begin = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        simulate(body, 3, seed=seed)
    assert time.monotonic() - begin < 5.0
    assert caught.value.kind == "deadlock"
    report = caught.value.report
    assert "ring on rank 2, block 0: thread 0 polls flags+0x0 of rank 2" in report
    assert "which is 0 (waits for 1)" in report
    assert "thread 1 and 62 more wait in __syncthreads_and" in report
    assert "on rank 1" not in report


@pytest.mark.parametrize("seed", [0, 7])
def test_the_step_limit(seed: int) -> None:
    ring = Ring(1)
    with pytest.raises(Deadlock) as caught:
        simulate(ring.step, 1, "impatient", seed=seed, max_steps=200)
    assert caught.value.kind == "step limit"
    assert "after 200 steps" in caught.value.report
    assert "impatient on rank 0" in caught.value.report


def test_a_loop_without_poll_pause_does_not_starve_others() -> None:
    ring = Ring(2)

    def body(group: Any) -> int:
        ring.register(group.simulation, group.rank)
        group.barrier()
        if group.rank == 0:
            ring.launch(group, "impatient", epoch=5)
        else:
            ring.launch(group, "set_flag", epoch=5)  # rank 0's flag
        return int(ring.out[group.rank, 0])

    assert simulate(body, 2)[0] == 1


def test_looking_at_the_clock_moves_it() -> None:
    ring = Ring(1)
    out = simulate(ring.step, 1, "clock", 50e-6)[0]
    assert 50_000 <= out[0] < 60_000


# ---- host code ---------------------------------------------------------------------------------
def test_the_first_error_is_raised_and_the_others_are_unwound() -> None:
    unwound: list[int] = []

    def body(group: Any) -> None:
        if group.rank == 2:
            raise ValueError("rank 2 is broken")
        try:
            group.barrier()
        except Exception:  # noqa: BLE001
            pytest.fail("an unwound rank must not see an exception that it could handle")
        finally:
            unwound.append(group.rank)

    before = threading.active_count()
    with pytest.raises(ValueError, match="rank 2 is broken") as caught:
        simulate(body, 4, seed=0)
    assert sorted(unwound) == [0, 1]  # rank 3 had not begun
    assert "rank 2 of 4" in caught.value.__notes__[0]
    assert threading.active_count() == before


def test_cleanup_code_that_communicates_does_not_hang() -> None:
    ring = Ring(3)

    def body(group: Any) -> None:
        try:
            if group.rank == 1:
                raise ValueError("broken")
            group.barrier()
        finally:
            if group.rank != 1:
                ring.launch(group, "ring")

    with pytest.raises(ValueError, match="broken"):
        simulate(body, 3)
    assert not [t for t in threading.enumerate() if t.name.startswith("moecomm rank")]


def test_a_rank_that_never_comes_times_out_in_virtual_time() -> None:
    def body(group: Any) -> None:
        if group.rank != 1:
            group.barrier(20.0, label="setup")

    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        simulate(body, 3)
    assert time.monotonic() - begin < 1.0
    assert (caught.value.phase, caught.value.peer) == ("setup", 1)


def test_the_store() -> None:
    def body(group: Any) -> Any:
        store = group.simulation.store(group.rank)
        total = store.add("number", 1)
        if group.rank == 0:
            store.set("key", b"value")
            with pytest.raises(TimeoutError):
                store.get("absent", 0.0)
            with pytest.raises(TimeoutError):
                store.get("absent", 3.0)
        value = store.get("key", 5.0)
        store.delete("absent")
        return total, value

    for seed in range(5):
        results = simulate(body, 3, seed=seed)
        assert sorted(total for total, _ in results) == [1, 2, 3]
        assert {value for _, value in results} == {b"value"}


def test_a_subgroup_numbers_its_ranks_itself() -> None:
    ring = Ring(2)

    def body(group: Any) -> list[int]:
        pair = group.subgroup([2, 0])
        return ring.step(pair, "ring", 5.0) if pair is not None else []

    results = simulate(body, 3, seed=4)
    assert results[1] == []
    assert [(r[0], r[2:4]) for r in (results[0], results[2])] == [(1, ring.sums)] * 2


def test_simulations_leave_nothing_behind() -> None:
    """Neither keys nor memory names nor counters of one are seen by the next."""

    def body(group: Any) -> int:
        return int(group.simulation.store(group.rank).add("number", 1))

    assert [simulate(body, 1) for _ in range(3)] == [[1]] * 3


def test_threads_of_a_rank_may_not_wait() -> None:
    errors: list[BaseException] = []

    def elsewhere(group: Any) -> None:
        try:
            group.simulation.store(0).get("absent", 1.0)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def body(group: Any) -> None:
        thread = threading.Thread(target=elsewhere, args=(group,))
        thread.start()
        thread.join()

    simulate(body, 1)
    assert isinstance(errors[0], StateError)


def test_misuse_is_refused() -> None:
    simulation = Simulation(1)
    assert simulation.run(lambda rank: rank) == [0]
    with pytest.raises(StateError, match="once"):
        simulation.run(lambda rank: rank)
    with pytest.raises(StateError, match="closed"):
        simulation.register(0, 4096, 16, "local", "late")
    with pytest.raises(ConfigError, match="num_ranks=0"):
        Simulation(0)
    with pytest.raises(ConfigError, match="kind="):
        simulate(lambda g: g.simulation.register(0, 4096, 16, "remote", "x"), 1)
    with pytest.raises(ConfigError, match="threads together"):
        simulate(_launch_many, 1)


def _launch_many(group: Any) -> None:
    args = Ring(1).args(0)
    group.simulation.launch(0, program("schedule"), [], "count", args, 65, 128)


# ---- faults ------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [0, 30])
def test_a_dead_rank(seed: int, steps: int) -> None:
    ring = Ring(3)
    ended: list[int] = []

    def body(group: Any) -> list[int]:
        try:
            return ring.step(group, "count", 30.0)
        finally:
            ended.append(group.rank)

    faults = Faults(dead_rank=1, dead_after_steps=0 if steps == 0 else steps)
    results = simulate(body, 3, seed=seed, faults=faults)
    assert results[1] is None
    assert sorted(ended) == [0, 1, 2]
    if steps == 0:
        assert [results[rank][0] for rank in (0, 2)] == [0, 0]


@pytest.mark.parametrize("checks", [False, True])
def test_a_lost_flag(checks: bool) -> None:
    ring = Ring(3)
    results = simulate(ring.step, 3, "ring", 1.0, checks=checks, faults=Faults(drop_nth_release=2))
    assert sorted(r[0] for r in results) == [0, 1, 1]
    ring = Ring(3)
    lost = Faults(drop_nth_release=2)
    results = simulate(ring.step, 3, "count", 1.0, checks=checks, faults=lost)
    assert int(ring.memory[:, 1].sum()) == 8


def test_a_flag_that_comes_twice() -> None:
    ring = Ring(3)
    simulate(ring.step, 3, "count", 1.0, faults=Faults(duplicate_release=3))
    assert sorted(ring.memory[:, 1].tolist()) == [3, 3, 4]
    last = set()
    for seed in range(20):
        ring = Ring(1)
        simulate(ring.step, 1, "two_stores", seed=seed, faults=Faults(duplicate_release=1))
        last.add(int(ring.memory[0, 0]))
    assert last == {1, 2}  # the repetition of the first comes before or after the second


def test_delayed_stores_show_a_missing_release() -> None:
    """C10: Without checks, in the fair schedule, which alone shows nothing."""

    def arrived(faults: Faults | None, **defines: int) -> bool:
        ring = Ring(2)
        results = simulate(ring.step_named, 2, defines, checks=False, faults=faults)
        return all(r[2:4] == ring.sums for r in results)

    late = Faults(delay_stores=True)
    assert arrived(None)
    assert arrived(late)
    assert arrived(None, NO_BARRIER=1, RELAXED_FLAG=1)
    assert not arrived(late, NO_BARRIER=1, RELAXED_FLAG=1)


def test_faults_are_checked() -> None:
    with pytest.raises(ConfigError, match="drop_nth_release=0"):
        Faults(drop_nth_release=0)
    with pytest.raises(ConfigError, match="dead_rank=-1"):
        Faults(dead_rank=-1)
