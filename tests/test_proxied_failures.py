"""Each fault of a network ends in ``PeerTimeout`` on every rank, in time, with the reason where it
was found; on a network that fails on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import fake_nic
import pytest
from exchange import Case, make_case, run_case
from fake_transport import network
from threads import run_threads

import moecomm as mc
from moecomm.errors import TransportError
from moecomm.transport.engine import state as S

TIMEOUT_S = 1.5
SLACK_S = 2.0
CFG = mc.MoeConfig(
    num_experts=6, top_k=3, hidden=24, max_tokens=6, wire="flags", timeout_s=TIMEOUT_S
)
Fault = Callable[[Any, mc.MoeComm], None]
Seen = tuple[int, TransportError | None]


def until_timeout(comm: mc.MoeComm, case: Case) -> tuple[mc.PeerTimeout, float]:
    """The error, and how long its step took to raise it."""
    while True:
        started = time.monotonic()
        try:
            run_case(comm, case)
        except mc.PeerTimeout as error:
            return error, time.monotonic() - started


def all_see(
    fault: Fault, at: int = 0, num_ranks: int = 3, node_size: int = 1, **fields: Any
) -> list[Seen]:
    """Steps until every rank has raised; ``fault`` strikes rank ``at`` after three. Whom each
    names, and what it says is the cause."""
    case = make_case(CFG, num_ranks, 0, tokens=[6] * num_ranks, dropped=0.0, repeated=0.0)

    def work(group: mc.Group) -> Seen:
        with mc.MoeComm(CFG, group, "fake") as comm:
            for _ in range(3):
                run_case(comm, case)
            group.barrier(30)
            if group.rank == at:
                fault(net, comm)
            error, waited = until_timeout(comm, case)
            assert waited < TIMEOUT_S + SLACK_S
            closing = time.monotonic()
        assert time.monotonic() - closing < TIMEOUT_S + SLACK_S
        cause = error.__cause__
        assert cause is None or isinstance(cause, TransportError)
        return error.peer, cause

    with network(num_ranks, node_size, words={fake_nic.REORDER: 1}, **fields) as net:
        return run_threads(work, num_ranks)


@pytest.mark.usefixtures("either_way")
def test_a_failed_write_names_its_peer_and_the_reason() -> None:
    """Rank 0's next write fails; whom that was for is named by all, the reason by rank 0."""
    seen = all_see(lambda net, comm: net.set(0, fake_nic.FAIL, 1))
    named = {peer for peer, _ in seen}
    assert len(named) == 1
    assert named < {1, 2}
    assert seen[0][1] is not None
    assert str(seen[0][1]) == (
        f"rank 0: a write to rank {seen[0][0]} by fake0 (fake) failed: fake error 5"
    )
    assert [cause for _, cause in seen[1:]] == [None, None]


@pytest.mark.usefixtures("either_way")
def test_a_silent_peer_is_named_by_all() -> None:
    """Nothing reaches rank 2, from anybody: it is missed before kernels lose patience."""

    def cut(net: Any, comm: mc.MoeComm) -> None:
        for rank in (0, 1):
            net.set(rank, fake_nic.SILENT, 1 << 2)

    seen = all_see(cut)
    assert [peer for peer, _ in seen[:2]] == [2, 2]
    assert seen[2][0] in (0, 1, 2)  # it hears what the others say, if they say it first
    assert any("nothing moved for too long" in str(cause) for _, cause in seen[:2])


@pytest.mark.usefixtures("either_way")
def test_a_nic_that_breaks_takes_its_rank_along() -> None:
    seen = all_see(lambda net, comm: net.set(1, fake_nic.BROKEN, 107), at=1)
    assert {peer for peer, _ in seen} == {1}
    assert "its completion queue failed: fake error 107" in str(seen[1][1])


@pytest.mark.usefixtures("either_way")
def test_a_stopped_mover_is_missed() -> None:
    """Its thread hangs: its rank is named, by itself too."""

    def stop(net: Any, comm: mc.MoeComm) -> None:
        engine = comm._runtime._mover._engine
        engine._resources.worker._command(S.PAUSE)

    seen = all_see(stop, at=1)
    assert [peer for peer, _ in seen] == [1, 1, 1]
    assert "nobody has looked after" in str(seen[1][1])


@pytest.mark.usefixtures("either_way")
def test_a_nic_that_reports_a_completion_twice_takes_its_rank_along() -> None:
    seen = all_see(lambda net, comm: net.set(1, fake_nic.TWICE, 1), at=1)
    assert [peer for peer, _ in seen] == [1, 1, 1]
    assert "it reported the completion of post" in str(seen[1][1])


@pytest.mark.usefixtures("either_way")
def test_a_peer_that_one_rank_cannot_reach_is_named_by_all() -> None:
    """EAGAIN for ever, from rank 0 to rank 2, which hears of it by way of rank 1."""
    seen = all_see(lambda net, comm: net.set(0, fake_nic.UNREACHABLE, 1 << 2))
    assert [peer for peer, _ in seen] == [2, 2, 2]
    assert str(seen[0][1]) == (
        "rank 0: a write to rank 2 by fake0 (fake) failed: nothing moved for too long"
    )


@pytest.mark.usefixtures("either_way")
def test_a_rank_whose_nic_takes_nothing_is_named_by_its_node_too() -> None:
    """Two nodes of two: rank 0 can tell nobody. It says why; all others miss it."""
    seen = all_see(lambda net, comm: net.set(0, fake_nic.REFUSED, 11111), num_ranks=4, node_size=2)
    assert seen[0][0] in (2, 3)
    assert "fake error 11111" in str(seen[0][1])
    assert [peer for peer, _ in seen[1:]] == [0, 0, 0]


def test_f08_registration_that_one_nic_refuses_is_everybodys_error() -> None:
    def work(group: mc.Group) -> str:
        with pytest.raises(mc.TransportError) as caught:
            mc.MoeComm(CFG, group, "fake")
        return str(caught.value)

    with network(2, 1, refuse_rank=1):
        seen = run_threads(work, 2)
    assert "told to refuse" in seen[1]
    assert "rank 1 failed in register" in seen[0]


def test_f05_a_network_that_is_not_there_is_everybodys_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And says which interfaces it looked for, before anything else is tried."""
    monkeypatch.setenv("MOECOMM_NODE_SIZE", "1")
    monkeypatch.setattr("moecomm.transport.efa.copies", list)

    def work(group: mc.Group) -> str:
        with pytest.raises(mc.TransportUnavailable) as caught:
            mc.MoeComm(CFG, group, "efa")
        return str(caught.value)

    for text in run_threads(work, 2):
        assert "transport='efa': no interface for 'auto'" in text


def test_f05_auto_says_what_it_came_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No RDMA device anywhere: a warning that it is tcp; one machine: no network at all."""
    case = make_case(CFG, 2, 0)

    def work(group: mc.Group) -> None:
        with mc.MoeComm(CFG, group) as comm:
            run_case(comm, case)

    monkeypatch.setattr("moecomm.transport.verbs.has_device", lambda: False)
    monkeypatch.setattr("moecomm.transport.efa.has_device", lambda: False)
    monkeypatch.setenv("MOECOMM_NODE_SIZE", "1")
    with caplog.at_level("INFO"):
        run_threads(work, 2)
    said = caplog.text
    assert "transport 'efa' over a stand-in: 2 ranks on 2 nodes" in said
    assert "transfer engine over" in said
    caplog.clear()
    monkeypatch.delenv("MOECOMM_NODE_SIZE")
    with caplog.at_level("INFO"):
        run_threads(work, 2)
    assert "transfer engine" not in caplog.text


@pytest.mark.parametrize(
    ("noticed", "missed", "named", "explained"),
    [(0, 2, 0, True), (1, 0, 0, True), (1, 2, 2, False)],
    ids=["missed-here", "missed-by-others", "others-miss-others"],
)
def test_a_rank_that_stood_still_names_itself_where_it_matters(
    monkeypatch: pytest.MonkeyPatch, noticed: int, missed: int, named: int, explained: bool
) -> None:
    """Kernels say who missed whom; this rank, 0, finds that its own mover had not turned."""
    slow = mc.TransportError("rank 0: nobody has looked after lo", peer=0, operation="progress")

    def work(group: mc.Group) -> mc.PeerTimeout:
        with mc.MoeComm(CFG, group) as comm:
            monkeypatch.setattr(comm._runtime, "failure", lambda: slow)
            trouble = comm._trouble
            trouble.rank, trouble.peer, trouble.code = noticed, missed, 1
            with pytest.raises(mc.PeerTimeout) as caught:
                comm.check()
        return caught.value

    (error,) = run_threads(work, 1)
    assert error.peer == named
    assert (error.__cause__ is slow) == explained
