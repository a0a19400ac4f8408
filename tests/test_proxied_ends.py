"""Ranks that die, hang, fail, or leave: processes of pretended nodes, joined by libfabric over tcp
and shm. The survivors hear of it, in time, with one name, and end cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
from exchange import Case, make_case, run_case
from proxied import BASE
from proxied_faults import FAULTS
from schedules import step_or_die

import moecomm as mc
from moecomm.run import outcomes

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(fabric: str, node_size: int) -> None:
        monkeypatch.setenv("MOECOMM_FABRIC", fabric)
        monkeypatch.setenv("MOECOMM_NODE_SIZE", str(node_size))

    return pretend


TIMEOUT_S = 2.0
SLACK_S = 2.0
DEAD = 1
SHORT = mc.MoeConfig(num_experts=6, top_k=3, hidden=40, max_tokens=8, timeout_s=TIMEOUT_S)


def given() -> Case:
    return make_case(SHORT, 4, 0, tokens=(8, 8, 8, 8), dropped=0.0, repeated=0.0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("half", "fabric", "node_size"),
    [("dispatch_send", "tcp", 1), ("dispatch_recv", "tcp", 2), ("combine_send", "shm", 1)],
)
def test_c02_c03_a_killed_peer_is_named_on_every_node(
    pretended: Any, half: str, fabric: str, node_size: int
) -> None:
    """kill -9 behind that half of a later step: one name everywhere, in time, and a clean end."""
    pretended(fabric, node_size)
    ends = outcomes(_survive, 4, half, transport="efa", timeout_s=60)
    assert ends[DEAD].exit_code == -signal.SIGKILL
    for rank, end in enumerate(ends):
        if rank == DEAD:
            continue
        assert end.error is None, end.error
        assert end.exit_code == 0
        peer, waited, closing, threads = end.value
        assert peer == DEAD, (rank, peer)
        assert waited < TIMEOUT_S + SLACK_S
        assert closing < TIMEOUT_S + SLACK_S
        assert threads == ["MainThread"]


def _survive(group: mc.Group, half: str) -> tuple[int, float, float, list[str]]:
    group.barrier(30)
    comm = mc.MoeComm(SHORT, group)
    case = given()
    for _ in range(3):
        run_case(comm, case)
    group.barrier(30)
    error, waited = _until_timeout(comm, case, half)
    with pytest.raises(mc.PeerTimeout):  # nothing is handed out as good any more
        comm.check()
    closed = time.monotonic()
    comm.close()
    closing = time.monotonic() - closed
    return error.peer, waited, closing, [t.name for t in threading.enumerate()]


def _until_timeout(comm: mc.MoeComm, case: Case, half: str = "") -> tuple[mc.PeerTimeout, float]:
    """The error, and how long its half took to raise it."""
    while True:
        asked = time.monotonic()
        try:
            step_or_die(comm, case, DEAD, half)
        except mc.PeerTimeout as error:
            return error, time.monotonic() - asked


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
def test_a_stopped_mover_and_a_failed_write(fabric: str) -> None:
    """Every rank hears of it in time and with one name, and the processes end by themselves."""
    ends = outcomes(_faulty, 4, fabric, transport="efa", timeout_s=100)
    assert [(end.error, end.exit_code) for end in ends] == [(None, 0)] * 4
    assert [end.value[1] for end in ends] == [["MainThread"]] * 4
    stopped, failed = zip(*(end.value[0] for end in ends), strict=True)
    assert [peer for peer, _ in stopped] == [DEAD] * 4
    assert "nobody has looked after" in stopped[DEAD][1]
    if fabric == "shm":
        return  # it calls a write done that the peer has refused: each names whom it misses
    # The connection ends, and both ends find out.
    whom, why = failed[DEAD]
    assert f"rank {DEAD}: a write to rank {whom} by lo (tcp) failed" in why
    assert {peer for peer, _ in failed} <= {DEAD, whom}


def _faulty(group: mc.Group, fabric: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Whom this rank names, and why, for each of ``FAULTS``; the threads that are left."""
    seen, case = [], given()
    os.environ.update(MOECOMM_FABRIC=fabric, MOECOMM_NODE_SIZE="1")
    for fault, bounce in zip(FAULTS, "01", strict=True):
        os.environ["MOECOMM_BOUNCE"] = bounce
        comm = mc.MoeComm(SHORT, group)
        for _ in range(3):
            run_case(comm, case)
        group.barrier(30)
        if group.rank == DEAD:
            FAULTS[fault](comm)
        error, waited = _until_timeout(comm, case)
        closed = time.monotonic()
        comm.close()
        assert waited < TIMEOUT_S + SLACK_S
        assert time.monotonic() - closed < TIMEOUT_S + SLACK_S
        seen.append((error.peer, str(error.__cause__)))
        group.barrier(30)
    return seen, [t.name for t in threading.enumerate()]


@pytest.mark.usefixtures("either_way")
def test_leaving_at_once_takes_nothing_from_the_others(pretended: Any) -> None:
    """Each rank closes as soon as it has what it wants; what it owes has gone by then, and that it
    is gone is nobody's trouble."""
    pretended("tcp", 1)
    mc.run(_leave, 3, transport="efa", timeout_s=120)


def _leave(group: mc.Group) -> None:
    cfg = mc.MoeConfig(**{**BASE, "in_flight": 2})
    cases = [make_case(cfg, group.size, seed) for seed in range(2)]
    for turn in range(6):
        with mc.MoeComm(cfg, group) as comm:
            for case in cases:
                run_case(comm, case)
            if group.rank == turn % 3:
                time.sleep(0.05)  # this one is behind
            handle = comm.dispatch_send(cases[0].xs[group.rank], cases[0].idxs[group.rank])
            if group.rank == turn % 3:
                time.sleep(0.05)
            comm.dispatch_recv(handle)
            handle.close()  # an acknowledgement, for which nobody here waits


def test_c03_an_exception_ends_the_process(tmp_path: Any) -> None:
    """Nobody closes anything: the worker thread keeps nobody from leaving, with the exit code."""
    script = tmp_path / "leave.py"
    script.write_text(
        textwrap.dedent(
            """
            import moecomm as mc
            from moecomm.store_local import LocalStore
            from concurrent.futures import ThreadPoolExecutor
            store = LocalStore()
            cfg = mc.MoeConfig(num_experts=2, top_k=1, hidden=16, max_tokens=2)
            make = lambda rank: mc.MoeComm(cfg, mc.Group(rank, 2, store), "efa")
            with ThreadPoolExecutor(2) as pool:
                kept = list(pool.map(make, range(2)))
            raise SystemExit(3)
            """
        )
    )
    variables = {**os.environ, "MOECOMM_NODE_SIZE": "1", "MOECOMM_FABRIC": "tcp"}
    ended = subprocess.run([sys.executable, script], env=variables, timeout=60, check=False)
    assert ended.returncode == 3
