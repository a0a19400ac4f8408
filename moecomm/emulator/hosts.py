"""The host side of a simulation: one Python thread per rank, of which one runs at a time.

A rank's thread runs until it asks for something that it must wait for: a kernel, a key of the
store. Then it hands the turn back, and the simulation decides who goes on. So host code
interleaves only at such calls and a run repeats exactly for a seed. Host code that waits for
another rank by other means (a ``threading.Event``, a ``sleep`` loop) hangs: nobody else has a turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

from moecomm.errors import StateError

UNWIND_TIMEOUT_S: Final = 10.0


class Unwound(BaseException):
    """Ends a rank's thread from inside: the simulation is over, or this rank is dead.

    Not an ``Exception``, so that user code does not take it for a failure to handle.
    """


@dataclass(frozen=True, slots=True)
class Ended:
    """A thread's last request: its function returned ``result`` or raised ``error``."""

    result: Any = None
    error: BaseException | None = None


class Hosts:
    """Threads of ranks 0 to ``num_ranks - 1``, each started by its first ``resume``."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_ranks)]
        self._requests: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._threads: list[threading.Thread | None] = [None] * num_ranks
        self._ended = [False] * num_ranks
        self._own = threading.local()

    def start(self, rank: int, call: Callable[[], Any]) -> Any:
        """Start ``rank`` on ``call`` and return its first request."""
        thread = threading.Thread(
            target=self._main, args=(rank, call), name=f"moecomm rank {rank}", daemon=True
        )
        self._threads[rank] = thread
        thread.start()
        return self._next_request()

    def resume(self, rank: int, answer: Any) -> Any:
        """Answer the request of ``rank``, let it run and return its next request.

        An answer that is an exception is raised there.
        """
        self._answers[rank].put(answer)
        return self._next_request()

    def own_rank(self) -> int | None:
        """The rank whose thread this is; ``None`` elsewhere."""
        rank: int | None = getattr(self._own, "rank", None)
        return rank

    def ask(self, request: Any) -> Any:
        """In a rank's thread: hand over ``request`` and the turn; return the answer."""
        rank = self.own_rank()
        if rank is None:
            raise StateError("a rank of a simulation may launch and wait in its own thread only")
        self._requests.put((rank, request))
        answer = self._answers[rank].get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def unwind(self) -> list[int]:
        """End all threads that still run; return the ranks whose threads would not."""
        stubborn = []
        for rank, thread in enumerate(self._threads):
            if thread is None:
                continue
            # Cleanup code (`finally`, `with`) may ask again: the answer stays the same.
            for _ in range(1000):
                if self._ended[rank]:
                    break
                self._answers[rank].put(Unwound())
                thread.join(0.001)
                if not self._await_request():
                    break
            thread.join(UNWIND_TIMEOUT_S if self._ended[rank] else 0.0)
            if thread.is_alive():
                stubborn.append(rank)
        return stubborn

    def _next_request(self) -> Any:
        rank, request = self._requests.get()
        if isinstance(request, Ended):
            self._ended[rank] = True
        return request

    def _await_request(self) -> bool:
        try:
            rank, request = self._requests.get(timeout=UNWIND_TIMEOUT_S)
        except Empty:
            return False
        if isinstance(request, Ended):
            self._ended[rank] = True
        return True

    def _main(self, rank: int, call: Callable[[], Any]) -> None:
        self._own.rank = rank
        try:
            ended = Ended(result=call())
        except BaseException as error:  # noqa: BLE001 - carried to the caller of the simulation
            ended = Ended(error=error)
        self._requests.put((rank, ended))
