"""Whose turn it is in a simulation: one rank's host code, else the kernels, else time itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moecomm.emulator import native
from moecomm.emulator.errors import EmulatorError
from moecomm.emulator.hosts import Ended, Hosts, Unwound
from moecomm.emulator.simulation_store import Values
from moecomm.emulator.world import Launch, World
from moecomm.errors import ConfigError

SLICE_NS: Final = 50_000_000  # how long kernels run before Python may handle a signal


@dataclass(frozen=True, slots=True)
class Wait:
    """Request of a rank: wait until ``key`` is set."""

    key: str
    deadline_ns: int


class Turns:
    """Runs the ranks of ``hosts`` and their launches in ``world``, in one order for a ``seed``.

    After ``run``: ``failure`` is the first error that a rank raised, with the rank; ``ended`` how
    each rank ended.
    """

    def __init__(self, hosts: Hosts, world: World, values: Values, seed: int) -> None:
        self.failure: tuple[int, BaseException] | None = None
        self.ended: dict[int, Ended] = {}
        self._hosts = hosts
        self._world = world
        self._values = values
        self._order = random.Random(seed) if seed else None
        self._requests: dict[int, Launch | Wait] = {}  # of ranks that wait
        self._launches: dict[int, int] = {}  # number → rank
        self._answers: dict[int, Any] = {}  # of ranks that can go on

    def run(self, calls: list[Callable[[], Any]]) -> None:
        """Run ``calls``, one a rank, until all have ended or one has failed."""
        for rank, call in enumerate(calls):
            self._take(rank, self._hosts.start(rank, call))
            if self.failure is not None:
                return
        while self.failure is None and self._go_on():
            pass

    def _go_on(self) -> bool:
        """Let somebody or something go on. False: nothing is left to do."""
        for rank, request in self._requests.items():
            if isinstance(request, Launch) or rank in self._answers:
                continue
            if request.key in self._values:
                self._answers[rank] = self._values.get(rank, request.key)
        if self._answers:
            ready = sorted(self._answers)
            rank = self._order.choice(ready) if self._order else ready[0]
            self._resume(rank, self._answers.pop(rank))
            return True
        return self._step() if self._launches else self._expire()

    def _resume(self, rank: int, answer: Any) -> None:
        del self._requests[rank]
        self._take(rank, self._hosts.resume(rank, answer))

    def _take(self, rank: int, request: Any) -> None:
        """``rank`` has run and now wants ``request``."""
        if isinstance(request, Ended):
            self.ended[rank] = request
            if request.error is not None and not isinstance(request.error, Unwound):
                self.failure = rank, request.error
            return
        self._requests[rank] = request
        if isinstance(request, Launch):
            try:
                self._launches[self._world.launch(rank, request)] = rank
            except (MemoryError, ConfigError) as error:
                self._answers[rank] = error

    def _step(self) -> bool:
        deadline = min(self._waits(), default=(0, 0))[0]
        event = self._world.step(SLICE_NS, deadline)
        if event == native.FINISHED:
            self._answers[self._launches.pop(self._world.take_finished())] = None
        elif event == native.FAILED:
            self._fail(self._world.failure())
        elif event == native.DIED:
            self._bury()
        elif event in (native.DEADLINE, native.STALLED):
            return self._expire()
        return True

    def _fail(self, failure: EmulatorError) -> None:
        """Raise ``failure`` in the launch of the rank that it names."""
        numbers = {rank: number for number, rank in self._launches.items()}
        rank = failure.rank if failure.rank in numbers else min(numbers)
        del self._launches[numbers[rank]]
        self._resume(rank, failure)
        if self.failure is None:  # the rank's function went on as if nothing had been
            self.failure = rank, failure

    def _bury(self) -> None:
        """End the thread of a rank that a fault has just stopped."""
        for number, rank in list(self._launches.items()):
            if self._world.is_dead(rank):
                del self._launches[number]
                del self._requests[rank]
                request = self._hosts.resume(rank, Unwound())
                while not isinstance(request, Ended):  # cleanup code that would talk to others
                    request = self._hosts.resume(rank, Unwound())
                self._take(rank, Ended())

    def _waits(self) -> list[tuple[int, int]]:
        return [
            (request.deadline_ns, rank)
            for rank, request in self._requests.items()
            if isinstance(request, Wait)
        ]

    def _expire(self) -> bool:
        """Time out the wait that ends first, letting time pass until then. False: no wait."""
        waits = self._waits()
        if not waits:
            return False
        deadline, rank = min(waits)
        self._world.move_time(deadline)
        request = self._requests[rank]
        assert isinstance(request, Wait)
        self._answers[rank] = TimeoutError(f"store key {request.key!r} was not set in time")
        return True
