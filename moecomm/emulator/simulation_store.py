"""The store of a simulation: what ranks exchange on the host before and beside their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from moecomm.emulator.world import World

Wait = Callable[[int, str, float], bytes]


class Values:
    """Keys and values of all ranks. With a value travels what its writer's host knew."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._values: dict[str, bytes] = {}
        self._tokens: dict[str, int] = {}  # key → number under which the world keeps it
        self._numbers = itertools.count()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def set(self, rank: int, key: str, value: bytes) -> None:
        self._values[key] = value
        token = self._tokens.setdefault(key, next(self._numbers))
        self._world.host_release(rank, token)

    def get(self, rank: int, key: str) -> bytes:
        """Return the value of ``key``, which exists; ``rank`` learns what its writer knew."""
        self._world.host_acquire(rank, self._tokens[key])
        return self._values[key]

    def delete(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            self._world.host_forget(self._tokens.pop(key))


class SimulationStore:
    """One rank's view of ``values``; ``wait(rank, key, timeout_s)`` waits for a key.

    A ``get`` that has to wait lets the other ranks run. Its timeout is in the simulation's time,
    which jumps when nothing else can happen, so that a rank that never comes costs no real time.
    """

    def __init__(self, values: Values, rank: int, wait: Wait) -> None:
        self._values = values
        self._rank = rank
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        self._values.set(self._rank, key, bytes(value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of ``key`` as soon as it is set. Raises ``TimeoutError``."""
        if key in self._values:
            return self._values.get(self._rank, key)
        if timeout_s <= 0:
            raise TimeoutError(f"store key {key!r} is not set")
        return self._wait(self._rank, key, timeout_s)

    def add(self, key: str, n: int) -> int:
        """Add to the number at ``key`` (absent: 0) and return the sum."""
        before = self._values.get(self._rank, key) if key in self._values else b"0"
        value = int(before) + n
        self._values.set(self._rank, key, str(value).encode())
        return value

    def delete(self, key: str) -> None:
        self._values.delete(key)

    def close(self) -> None:
        """Nothing to let go of."""
