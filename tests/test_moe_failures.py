"""What the others see when a rank dies, is silent, or leaves: an error in time, and an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from exchange import Case, make_case, run_case
from schedules import dispatch_arguments, step_or_die

import moecomm as mc
from moecomm.run import outcomes

pytestmark = pytest.mark.usefixtures("poisoned")

TIMEOUT_S = 1.0
SLACK_S = 2.0  # the roll-call, and a loaded machine
CFG = mc.MoeConfig(num_experts=6, top_k=3, hidden=40, max_tokens=8, timeout_s=TIMEOUT_S)
DEAD = 1
Survivor = tuple[str, int, float, float, list[str]]  # phase, peer, waited, closing, threads left


def case() -> Case:
    return make_case(CFG, 3, 0, tokens=(8, 8, 8), dropped=0.0, repeated=0.0)


def _comm(group: mc.Group) -> mc.MoeComm:
    """Made by all ranks at one time: processes start seconds apart on a busy machine."""
    group.barrier(30)
    return mc.MoeComm(CFG, group)


@pytest.mark.parametrize("half", ["dispatch_send", "dispatch_recv", "combine_send"])
def test_c02_c03_a_killed_peer_is_named_in_time_and_everybody_leaves(half: str) -> None:
    """kill -9 after that half of a later step."""
    started = time.monotonic()
    ends = outcomes(_survive, 3, half, timeout_s=60)
    assert ends[DEAD].exit_code == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert end.error is None, end.error
        assert end.exit_code == 0  # it left by itself
        phase, peer, waited, closing, threads = end.value
        assert peer == DEAD
        assert phase in ("dispatch_send", "dispatch_recv", "combine_recv")
        assert waited < TIMEOUT_S + SLACK_S
        assert closing < 1.0
        assert threads == ["MainThread"]
    assert time.monotonic() - started < 20


def _survive(group: mc.Group, half: str) -> Survivor:
    comm = _comm(group)
    given = case()
    for _ in range(3):
        run_case(comm, given)
    group.barrier(30)
    asked = time.monotonic()
    try:
        while True:  # a step that does not need the dead rank may still be right
            asked = time.monotonic()
            step_or_die(comm, given, DEAD, half)
    except mc.PeerTimeout as error:
        waited = time.monotonic() - asked
        with pytest.raises(mc.PeerTimeout):
            comm.check()
        with pytest.raises(mc.PeerTimeout):  # nothing is handed out as good any more
            comm.dispatch_send(*dispatch_arguments(given, group.rank))
        closed = time.monotonic()
        comm.close()
        closing = time.monotonic() - closed
        return error.phase, error.peer, waited, closing, [t.name for t in threading.enumerate()]


def test_c02_a_peer_killed_at_any_moment() -> None:
    """The kill comes from outside, amid a kernel or not; results before it are right. A rank that
    got its last words waits for the other survivor, which waits for more: both name the dead."""
    ends = outcomes(_shot, 3, timeout_s=60)
    assert ends[DEAD].exit_code == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert end.error is None, end.error
    assert {ends[0].value, ends[2].value} == {DEAD}


def _shot(group: mc.Group) -> int:
    given = case()
    with _comm(group) as comm:
        run_case(comm, given)
        if group.rank == DEAD:
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
        with pytest.raises(mc.PeerTimeout) as caught:
            _for_ever(comm, given)
    return caught.value.peer


def _for_ever(comm: mc.MoeComm, given: Case) -> None:
    while True:
        run_case(comm, given)


def test_c02_a_stopped_peer_that_comes_back_is_told() -> None:
    """It must not go on with a step that the others have given up."""
    for rank, (reporter, peer) in enumerate(mc.run(_stopped, 3, timeout_s=60)):
        assert peer == DEAD
        assert reporter != DEAD, rank


def _stopped(group: mc.Group) -> tuple[int | None, int]:
    given = case()
    pids = [int(pid) for pid in group.all_gather(str(os.getpid()).encode(), 30)]
    with _comm(group) as comm:
        run_case(comm, given)
        if group.rank == DEAD:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(mc.PeerTimeout) as caught:
            _for_ever(comm, given)
        if group.rank == 0:
            os.kill(pids[DEAD], signal.SIGCONT)
    return caught.value.rank, caught.value.peer


def test_c03_a_timeout_that_nobody_catches_is_the_exit_code() -> None:
    """Of the silent rank too, which is done and leaves first."""
    ends = outcomes(_silent, 3, timeout_s=60)
    assert ends[DEAD].value == "left"
    for end in (ends[0], ends[2]):
        assert isinstance(end.error, mc.PeerTimeout)
        assert (end.error.peer, end.error.phase, end.exit_code) == (DEAD, "dispatch_recv", 1)


def _silent(group: mc.Group) -> str:
    with _comm(group) as comm:
        if group.rank != DEAD:
            comm.dispatch(*dispatch_arguments(case(), group.rank))
    return "left"


def test_c03_a_rank_that_never_comes_to_the_constructor() -> None:
    """Bootstrap, too, ends: the missing rank is named on all that wait."""
    ends = outcomes(_absent, 3, timeout_s=60)
    for end in (ends[0], ends[2]):
        assert isinstance(end.error, mc.PeerTimeout)
        assert (end.error.peer, end.error.phase) == (DEAD, "bootstrap")


def _absent(group: mc.Group) -> None:
    if group.rank != DEAD:
        mc.MoeComm(CFG, group)


# ---- leaving without close ------------------------------------------------------------------

SCRIPT = """
    import os, sys, time
    import numpy as np
    import moecomm as mc

    def work(group, how):
        cfg = mc.MoeConfig(num_experts=4, top_k=2, hidden=8, max_tokens=4,
                           dispatch_dtype="float32")
        comm = mc.MoeComm(cfg, group)
        if how == "half way":
            comm.dispatch(np.ones((4, 8), np.float32), np.zeros((4, 2), np.int32))
        group.barrier(30)
        if how == "raise" and group.rank == 1:
            raise KeyError("mine")
        if group.rank == 0:
            time.sleep(0.5)     # the other has left by then
        return how

    if __name__ == "__main__":
        print(mc.run(work, 2, sys.argv[1], timeout_s=30))
"""


@pytest.mark.parametrize(("how", "code"), [("plain", 0), ("half way", 0), ("raise", 1)])
def test_d09_no_close_and_one_rank_leaves_first(tmp_path: Path, how: str, code: int) -> None:
    """The exit code stays what the program makes it, nothing hangs, and nothing is printed."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), how],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert time.monotonic() - started < 15
    if code:
        assert "KeyError: 'mine'" in done.stderr
    else:
        assert done.stdout.strip() == str([how, how])
        assert done.stderr == ""
