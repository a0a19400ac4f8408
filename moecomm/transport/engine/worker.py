"""The thread that runs the hot loop: pinned, paused, stopped; every wait for it is bounded."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, TypeVar

from moecomm.errors import StateError, TransportError
from moecomm.transport.engine import state as S

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 10.0


class Worker:
    """One thread. It first calls what it is given (``call``), then runs the loop until ``stop``.

    Args:
        name: of the thread.
        cpus: processors it may use; empty: all of this process.
    """

    def __init__(self, name: str, cpus: frozenset[int]) -> None:
        self._cpus = cpus
        self._queue: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._engine = 0
        # A daemon: an engine that nobody closed must not keep the interpreter from ending. The
        # engine stops it at exit, before its memory goes.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What ``function`` returns on the thread, or raises there; before ``start``."""
        future: Future[T] = Future()

        def run() -> bool:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised in the caller
                future.set_exception(error)
            return True

        self._queue.put(run)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise TransportError(
                f"{self._thread.name} did not answer within {timeout_s:g} s", operation="open"
            ) from error

    def start(self, engine: int) -> None:
        """Run the loop on the records at ``engine``."""
        from moecomm.transport.engine import loop

        self._engine = engine

        def run() -> bool:
            loop.run(engine)
            return False

        self._queue.put(run)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The loop stands still inside, or has ended.

        Raises:
            TransportError: it does not; a library call in it hangs.
        """
        if not self._running():
            yield
            return
        self._command(S.PAUSE)
        try:
            self._wait_for(S.PAUSED)
            yield
        finally:
            self._command(S.RUN)
            self._wait_for(S.RUNNING)  # or the next pause would take this one for its own

    def seconds(self) -> float:
        """Processor time that the thread has used; 0 where the system does not tell."""
        if not self._thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def stop(self) -> bool:
        """End the thread; whether it has ended in time. Its memory must stay if it has not."""
        if self._engine:
            self._command(S.STOP)
        self._queue.put(lambda: False)
        if threading.current_thread() is self._thread:
            raise StateError("close: called on the engine's own thread")
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error(
                "%s does not stop: a library call in it hangs; its memory is not freed",
                self._thread.name,
            )
            return False
        return True

    def _main(self) -> None:
        if self._cpus and hasattr(os, "sched_setaffinity"):
            try:
                os.sched_setaffinity(0, self._cpus)  # 0: the calling thread
            except OSError as error:
                logger.warning("%s is not pinned: %s", self._thread.name, error)
        while self._queue.get()():
            pass

    def _running(self) -> bool:
        return self._engine != 0 and self._thread.is_alive() and self._phase() != S.ENDED

    def _phase(self) -> int:
        from moecomm.transport.engine.ring import load

        return int(load(self._engine + S.PHASE))

    def _command(self, value: int) -> None:
        from moecomm.transport.engine.ring import store

        store(self._engine + S.COMMAND, value)

    def _wait_for(self, phase: int) -> None:
        deadline = time.monotonic() + PAUSE_TIMEOUT_S
        while self._phase() not in (phase, S.ENDED):
            if time.monotonic() > deadline:
                raise TransportError(
                    f"{self._thread.name} does not pause within {PAUSE_TIMEOUT_S:g} s: a library "
                    "call in it hangs",
                    operation="pause",
                )
            time.sleep(0.00005)
