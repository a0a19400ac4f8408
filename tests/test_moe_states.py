"""Calls that come in the wrong order, on the wrong handle, too often, too late or in a fork."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from exchange import make_case, run_case

import moecomm as mc
from moecomm.store_local import LocalStore

pytestmark = pytest.mark.usefixtures("poisoned")

CFG = mc.MoeConfig(
    num_experts=4,
    top_k=2,
    hidden=8,
    max_tokens=4,
    dispatch_dtype="float32",
    combine_dtype="float32",
    timeout_s=5,
)
HALVES = ("dispatch_recv", "combine_send", "combine_recv")


def solo(cfg: mc.MoeConfig = CFG) -> mc.MoeComm:
    """A communicator of one rank."""
    return mc.MoeComm(cfg, mc.Group(0, 1, LocalStore(), device="cpu"))


@pytest.fixture
def comm() -> Iterator[mc.MoeComm]:
    with solo() as made:
        yield made


def send(comm: mc.MoeComm) -> mc.Handle:
    x = np.ones((2, CFG.hidden), np.float32)
    return comm.dispatch_send(x, np.array([[0, 1], [3, 0]]), np.ones((2, 2), np.float32))


def half(comm: mc.MoeComm, handle: mc.Handle, name: str) -> Any:
    y = np.zeros(comm.layout.recv_shape, np.float32)
    call = getattr(comm, name)
    return call(y, handle) if name == "combine_send" else call(handle)


def at(comm: mc.MoeComm, stage: int) -> mc.Handle:
    """A handle of which ``stage`` halves after dispatch_send have been called."""
    handle = send(comm)
    for name in HALVES[:stage]:
        half(comm, handle, name)
    return handle


@pytest.mark.parametrize("stage", range(4), ids=["sent", "received", "returned", "combined"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_in_another_order(comm: mc.MoeComm, name: str, stage: int) -> None:
    """Each half has one place; a refused call changes nothing."""
    handle = at(comm, stage)
    if HALVES[stage : stage + 1] != (name,):
        before = repr(handle)
        with pytest.raises(mc.StateError, match=f"^{name}: must come when"):
            half(comm, handle, name)
        assert repr(handle) == before
    for name in HALVES[stage:]:
        half(comm, handle, name)
    comm.check()


@pytest.mark.parametrize("name", HALVES)
def test_a_handle_of_another_communicator(comm: mc.MoeComm, name: str) -> None:
    with solo() as other:
        handle = at(other, HALVES.index(name))
        with pytest.raises(mc.StateError, match=f"{name}: .* belongs to another MoeComm"):
            half(comm, handle, name)


@pytest.mark.parametrize("stage", range(4), ids=["sent", "received", "returned", "combined"])
@pytest.mark.parametrize("name", HALVES)
def test_a_stale_handle_whose_slot_is_in_use_again(comm: mc.MoeComm, name: str, stage: int) -> None:
    stale = at(comm, stage)
    stale.close()
    stale.close()
    fresh = at(comm, HALVES.index(name))
    assert fresh.slot == stale.slot
    with pytest.raises(mc.StateError, match=r"of this handle, it is closed"):
        half(comm, stale, name)
    stale.close()  # not what has the slot now
    half(comm, fresh, name)


def test_more_handles_than_in_flight(comm: mc.MoeComm) -> None:
    handles = [send(comm) for _ in range(CFG.in_flight)]
    with pytest.raises(mc.StateError, match=r"in_flight=2 handles are open.*raise in_flight"):
        send(comm)
    for name in HALVES:
        half(comm, handles[1], name)
    handles.append(send(comm))
    with pytest.raises(mc.StateError, match="in_flight=2"):
        send(comm)
    handles[0].close()
    for name in HALVES:
        half(comm, handles[2], name)


def test_a_refused_call_takes_no_slot(comm: mc.MoeComm) -> None:
    for _ in range(CFG.in_flight + 1):
        with pytest.raises(mc.ConfigError, match="topk_idx"):
            comm.dispatch_send(np.ones((1, 8), np.float32), np.array([[0, 9]]))
        with pytest.raises(mc.ConfigError, match="x has 5 tokens"):
            comm.dispatch_send(np.ones((5, 8), np.float32), np.zeros((5, 2), np.int64))
    run_case(comm, make_case(CFG, 1))


def test_after_close() -> None:
    comm = solo()
    open_handle, recv_handle = send(comm), at(comm, 1)
    comm.close()
    comm.close()
    calls: list[Callable[[], Any]] = [lambda: send(comm), comm.stats]
    calls += [lambda name=name: half(comm, open_handle, name) for name in HALVES]
    for call in calls:
        with pytest.raises(mc.StateError, match="this MoeComm is closed"):
            call()
    for handle in (open_handle, recv_handle):
        handle.close()
        assert "closed" in repr(handle)
    comm.check()


def test_received_arrays_outlive_the_communicator(comm: mc.MoeComm) -> None:
    with solo() as other:
        recv = other.dispatch_recv(send(other))
    del other
    assert recv.counts.tolist() == [2, 1, 0, 1]
    assert (recv.x[0, :2] == 1).all()


def test_the_context_manager_closes_on_an_error_too() -> None:
    with pytest.raises(KeyError), solo() as comm:
        raise KeyError
    with pytest.raises(mc.StateError):
        send(comm)


def test_f13_a_forked_child_is_refused_and_disturbs_nobody() -> None:
    mc.run(_fork, 2, timeout_s=60)


def _fork(group: mc.Group) -> None:
    with mc.MoeComm(CFG, group) as comm:
        case = make_case(CFG, 2, tokens=(4, 4))
        handle = send(comm)
        with _held_by_another_thread(comm._lock):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # rather than wait for a thread that is not here
                os._exit(_in_child(comm, handle))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        for name in HALVES:
            half(comm, handle, name)
        run_case(comm, case)


@contextlib.contextmanager
def _held_by_another_thread(lock: Any) -> Iterator[None]:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    yield
    free.set()
    thread.join()


def _in_child(comm: mc.MoeComm, handle: mc.Handle) -> int:
    """0 when all is as it should be. The parent's memory is shared with peers, or mapped here: a
    kernel that ran in the child would reach them."""

    def launched(*_: Any) -> None:
        os._exit(99)

    comm._runtime.launch = launched  # type: ignore[method-assign]
    calls: list[Callable[[], Any]] = [lambda: send(comm), comm.stats]
    calls += [lambda name=name: half(comm, handle, name) for name in HALVES]
    for number, call in enumerate(calls, 1):
        try:
            call()
        except mc.StateError as error:
            if "forked child" in str(error):
                continue
        except BaseException:  # noqa: BLE001  anything else is what the exit code says
            pass
        return number
    handle.close()
    comm.close()
    return 0


def test_closing_a_handle_that_overflows_says_nothing_and_frees_its_slot() -> None:
    cfg = dataclasses.replace(CFG, layout="grouped", max_recv_tokens=3, in_flight=1)
    with solo(cfg) as comm:
        for _ in range(3):
            handle = send(comm)  # four rows, and room for three
            handle.close()
            assert "closed" in repr(handle) or "failed" in repr(handle)
        comm.check()
        with pytest.raises(mc.Overflow, match="would receive 4 rows, max_recv_tokens allows 3"):
            comm.dispatch_recv(send(comm))
