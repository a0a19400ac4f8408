"""``moecomm.run``: errors, ends of every kind, and that no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import processes
import pytest
from rank_functions import (
    CarriesData,
    describe,
    end_badly,
    leave_without_close,
    misbehave,
    return_unless,
    square_sum,
    start_others,
    wait_briefly,
)

from moecomm.errors import PeerTimeout, TransportError
from moecomm.run import outcomes, run

pytestmark = pytest.mark.usefixtures("nothing_left")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def enough(seconds: float) -> float:
    """A time-out in which ranks surely start on this machine, as busy as it is now."""
    start = time.monotonic()
    run(describe, 3)
    return max(seconds, 5 * (time.monotonic() - start))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_an_error_keeps_its_type_and_brings_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(CarriesData, match="the effect") as got:
        run(misbehave, 3, "raise")
    assert time.monotonic() - start < 10, "the other ranks were waited for"
    assert got.value.data == {"a": 1}
    text = notes(got.value)
    assert "raised on rank 1 of 3" in text
    assert "in raise_with_cause" in text
    assert "KeyError: 'the cause'" in text


def test_an_error_that_does_not_pickle_is_described() -> None:
    with pytest.raises(TransportError, match=r"rank 1 raised .*DoesNotPickle: 1 and 2") as got:
        run(misbehave, 2, "raise unpicklable")
    assert "in raise_unpicklable" in notes(got.value)
    assert got.value.peer == 1


def test_our_errors_keep_their_fields() -> None:
    with pytest.raises(PeerTimeout) as got:
        run(misbehave, 2, "time out")
    error = got.value
    assert (error.phase, error.peer, error.expected, error.seen) == ("dispatch_recv", 1, 2, 1)
    assert error.rank == 0 or error.peer == 1


@pytest.mark.parametrize(
    ("how", "text", "code"),
    [
        ("os._exit", "rank 1 left with exit code 3 before its function returned", 3),
        ("os._exit(0)", "rank 1 left with exit code 0 before", 0),
        ("sys.exit", "rank 1 left with exit code 4 before", 4),
        ("sys.exit text", "rank 1 left with exit code 1 before", 1),
        ("kill", r"rank 1 was killed by signal 9 \(SIGKILL\) before", -9),
        ("terminate", r"rank 1 was killed by signal 15 \(SIGTERM\) before", -15),
        ("interrupt", r"rank 1 was killed by signal 2 \(SIGINT\) before", -2),
        ("crash", r"rank 1 was killed by signal 11 \(SIGSEGV\) before", -11),
    ],
)
def test_a_rank_that_leaves_is_named(how: str, text: str, code: int) -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match=text) as got:
        run(misbehave, 2, how)
    assert time.monotonic() - start < 10
    assert (got.value.peer, got.value.code, got.value.operation) == (1, code, "run")
    if how == "crash":
        assert "in string_at" in notes(got.value)
    if how == "sys.exit text":
        assert "a reason" in notes(got.value)


@pytest.mark.parametrize("how", ["hang", "hang in native code"])
def test_ranks_that_hang_are_named_with_their_stacks(how: str) -> None:
    timeout_s = enough(1.0)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"timeout_s=.* is over and ranks 0, 1 of 2") as got:
        run(misbehave, 2, how, timeout_s=timeout_s)
    assert timeout_s <= time.monotonic() - start < timeout_s + 5
    assert f"timeout_s={timeout_s:g} is" in str(got.value)
    text = notes(got.value)
    assert "rank 0:" in text
    assert "in barrier" in text
    assert how.replace(" ", "_") in text


def test_only_the_ranks_that_still_run_are_named() -> None:
    timeout_s = enough(1.0)
    with pytest.raises(TransportError, match="is over and rank 2 of 3 still run") as got:
        run(return_unless, 3, 2, timeout_s=timeout_s)
    assert got.value.peer == 2


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit code", "rank 1 left with exit code 5 after its function returned"),
        ("signal", r"rank 1 was killed by signal 9 \(SIGKILL\) after its function returned"),
        ("thread", "rank 1 of 2 still run"),
    ],
)
def test_an_end_that_goes_wrong_is_not_hidden(how: str, text: str) -> None:
    timeout_s = enough(1.0) if how == "thread" else 20.0
    with pytest.raises(TransportError, match=text):
        run(end_badly, 2, how, timeout_s=timeout_s)


def test_leaving_without_close_is_no_error() -> None:  # D09
    start = time.monotonic()
    assert run(leave_without_close, 3) == [0, 1, 2]
    assert time.monotonic() - start < 5


def test_outcomes_let_the_others_finish() -> None:
    got = outcomes(misbehave, 3, "kill", 2, timeout_s=enough(1.0))
    assert [o.rank for o in got] == [0, 1, 2]
    assert got[2].exit_code == -9
    assert "killed by signal 9" in str(got[2].error)
    assert all("still run" in str(o.error) for o in got[:2])
    got = outcomes(wait_briefly, 2)
    assert [type(o.error) for o in got] == [PeerTimeout, type(None)]
    assert (got[0].value, got[1].value) == (None, "did not come")


# No process is left (see the fixture, which checks every test)


@linux_only
@pytest.mark.parametrize("how", ["return", "fork", "raise"])
def test_what_ranks_have_started_ends_with_them(how: str) -> None:
    start = time.monotonic()
    try:
        assert len(run(start_others, 2, how)) == 2
    except ValueError:
        assert how == "raise"
    assert time.monotonic() - start < 10


INTERRUPTED = r"""
import os, sys, time
from moecomm.run import run

def work(group):
    group.barrier()
    os.write(1, b"started\n")
    time.sleep(100)

if __name__ == "__main__":
    try:
        run(work, 3)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(9)
"""


@linux_only
@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        (signal.SIGINT, False, 9),
        (signal.SIGINT, True, 9),
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["Ctrl-C to the caller", "Ctrl-C to all", "SIGTERM", "SIGKILL"],
)
def test_ranks_end_with_their_caller(
    number: int, whole_group: bool, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "interrupted.py"
    path.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as caller:
        assert caller.stdout is not None
        for _ in range(3):
            assert caller.stdout.readline() == "started\n"
        mark = os.environ[processes.VARIABLE]
        assert len(processes.marked(mark)) == 4
        (os.killpg if whole_group else os.kill)(caller.pid, number)
        assert caller.wait(10) == code
        assert processes.wait_until_gone(mark, 5) == []
        out, err = caller.communicate()
        assert out == ("interrupted\n" if code == 9 else "")
        assert "Traceback" not in err


def test_many_runs_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = threading.active_count(), processes.descriptors()
    for n in range(3):
        run(square_sum, 2, n)
        with pytest.raises(TransportError):
            run(misbehave, 2, "kill")
    assert (threading.active_count(), processes.descriptors()) == before
    assert os.listdir(tmp_path) == []


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = subprocess.Popen, []

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no more processes")
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        run(square_sum, 3, 1)
    assert len(calls) == 2
