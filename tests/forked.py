"""Ranks as processes forked from this one: what it has imported they need not import again, which
on an emulated machine is most of the time. The parent must not have used what they will use (a
device, a thread)."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import moecomm as mc
from moecomm.store import TcpStore

_PORT = struct.Struct("!I")


def run_forked(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 200.0
) -> list[Any]:
    """``fn(group, *args)`` on every rank; results in rank order, ``None`` for a rank that was
    killed. The lowest failed rank's error is raised. No rank ends before all have a result: one of
    them serves the store."""
    context = get_context("fork")
    port = os.pipe()
    processes, results = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        process = context.Process(
            target=_rank, args=(fn, rank, num_ranks, port, there, args), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside a library's threads
            process.start()
        there.close()
        processes.append(process)
        results.append(here)
    try:
        outcomes = _collect(results, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for end in port:
            os.close(end)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, _Failure):
            outcome.error.add_note(f"on rank {rank}:\n{outcome.text}")
            raise outcome.error
    return outcomes


def die() -> None:
    """End this rank as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Failure:
    def __init__(self, error: BaseException, text: str) -> None:
        self.error, self.text = error, text


def _collect(results: list[Connection], deadline: float) -> list[Any]:
    """What each rank sends, ``None`` where it ends without; then all may go."""
    outcomes: list[Any] = [None] * len(results)
    waiting = dict(enumerate(results))
    while waiting:
        left = deadline - time.monotonic()
        ready = wait(list(waiting.values()), max(0.0, left))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting)} do not end")
        for rank, connection in list(waiting.items()):
            if connection in ready:
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    outcomes[rank] = None  # killed
                del waiting[rank]
    for connection in results:
        connection.close()
    return outcomes


def _rank(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    port: tuple[int, int],
    result: Connection,
    args: tuple[Any, ...],
) -> None:
    try:
        with _store(rank, size, port) as store, mc.Group(rank, size, store) as group:
            result.send(fn(group, *args))
            _wait_for_the_others(result)
    except BaseException as error:  # noqa: BLE001 - it is raised by the parent
        text = traceback.format_exc()
        try:
            result.send(_Failure(error, text))
        except Exception:  # noqa: BLE001
            result.send(_Failure(RuntimeError(f"an error that does not pickle: {error!r}"), text))


def _wait_for_the_others(result: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        result.recv()


def _store(rank: int, size: int, port: tuple[int, int]) -> TcpStore:
    if rank > 0:
        (number,) = _PORT.unpack(os.read(port[0], _PORT.size))
        return TcpStore("127.0.0.1", number)
    store = TcpStore("127.0.0.1", 0, serve=True)
    os.write(port[1], _PORT.pack(store.address[1]) * (size - 1))
    return store
