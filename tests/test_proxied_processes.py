"""Ranks that are processes of pretended nodes, joined by libfabric over tcp and shm: the code path
of EFA. Every layout bit for bit as the reference; killed peers; leaving early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, run_case
from schedules import for_rank, random_schedule, walk

import moecomm as mc
from moecomm.run import outcomes

pytestmark = pytest.mark.usefixtures("poisoned")

BASE: dict[str, Any] = {
    "num_experts": 9, "top_k": 3, "hidden": 80, "max_tokens": 40, "timeout_s": 20.0, "in_flight": 3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched-sender": {"reduce": "sender"},
    "grouped": {"layout": "grouped", "expert_alignment": 8},
    "grouped-sender": {"layout": "grouped", "reduce": "sender"},
    "rank": {"layout": "rank"},
    "rank-capped": {"layout": "rank", "max_recv_tokens": 160},
    "replicas": {"replicas": 2},
    "fp8": {"layout": "grouped", "dispatch_dtype": "float8_e4m3fn", "scale_block": 16},
}
# More than are private to some, skewed; none to others.
TOKENS = [(40, 0, 5, 17), (0, 0, 0, 0), (1, 40, 7, 0), (40, 40, 40, 40)]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(fabric: str, node_size: int) -> None:
        monkeypatch.setenv("MOECOMM_FABRIC", fabric)
        monkeypatch.setenv("MOECOMM_NODE_SIZE", str(node_size))

    return pretend


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("fabric", "node_size"), [("tcp", 1), ("shm", 2)])
def test_every_layout_equals_the_reference(pretended: Any, fabric: str, node_size: int) -> None:
    """Handles out of order, another order on every rank, some closed unfinished."""
    pretended(fabric, node_size)
    for wrong in mc.run(_matrix, 4, transport="efa", timeout_s=240):
        assert not any(wrong.values()), wrong


def _matrix(group: mc.Group) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = {}
    for seed, (name, changes) in enumerate(CONFIGS.items()):
        cfg = mc.MoeConfig(**{**BASE, **changes})
        groups = group.size // cfg.replicas
        cases = [
            make_case(cfg, group.size, n, tokens=counts[:groups], skew=0.3 * n)
            for n, counts in enumerate(TOKENS)
        ]
        schedule = random_schedule(np.random.default_rng(seed), 12, cfg.in_flight, closed=0.2)
        own = np.random.default_rng(group.rank + 2)
        with mc.MoeComm(cfg, group) as comm:
            walk(comm, cases, for_rank(schedule, own), report=wrong.setdefault(name, []).append)
    return wrong


# ---- ranks that die, are silent, or leave --------------------------------------------------------

TIMEOUT_S = 2.0
SLACK_S = 2.0
DEAD = 1
SHORT = mc.MoeConfig(num_experts=6, top_k=3, hidden=40, max_tokens=8, timeout_s=TIMEOUT_S)


def given() -> Case:
    return make_case(SHORT, 4, 0, tokens=(8, 8, 8, 8), dropped=0.0, repeated=0.0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("half", "node_size"), [("send", 1), ("recv", 2)])
def test_c02_c03_a_killed_peer_is_named_on_every_node(
    pretended: Any, half: str, node_size: int
) -> None:
    """kill -9 behind that half of a later step: one name everywhere, in time, and a clean end."""
    pretended("tcp", node_size)
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


def _until_timeout(comm: mc.MoeComm, case: Case, half: str) -> tuple[mc.PeerTimeout, float]:
    """The error, and how long its half took to raise it."""
    while True:
        asked = time.monotonic()
        try:
            _step(comm, case, half)
        except mc.PeerTimeout as error:
            return error, time.monotonic() - asked


def _step(comm: mc.MoeComm, case: Case, half: str) -> None:
    rank = comm.group.rank

    def now(name: str) -> None:
        if rank == DEAD and name == half:
            os.kill(os.getpid(), signal.SIGKILL)

    handle = comm.dispatch_send(case.xs[rank], case.idxs[rank])
    now("send")
    comm.dispatch_recv(handle)
    now("recv")
    comm.combine_send(case.ys[rank], handle)
    now("return")
    comm.combine_recv(handle, case.weights[rank])


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
