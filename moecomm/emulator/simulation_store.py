"""The store of a simulation: what ranks exchange on the host before and beside their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moecomm.emulator.simulation import Simulation


class SimulationStore:
    """One rank's view of the keys that all ranks of ``simulation`` share.

    A ``get`` that has to wait lets the other ranks run. Its timeout is in the simulation's time,
    which jumps when nothing else can happen, so that a rank that never comes costs no real time.
    """

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation = simulation
        self._rank = rank

    def set(self, key: str, value: bytes) -> None:
        self._simulation.store_set(self._rank, key, bytes(value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of ``key`` as soon as it is set. Raises ``TimeoutError``."""
        return self._simulation.store_get(self._rank, key, timeout_s)

    def add(self, key: str, n: int) -> int:
        """Add to the number at ``key`` (absent: 0) and return the sum."""
        value = int(self._simulation.store_peek(self._rank, key) or b"0") + n
        self._simulation.store_set(self._rank, key, str(value).encode())
        return value

    def delete(self, key: str) -> None:
        self._simulation.store_delete(key)

    def close(self) -> None:
        """Nothing to let go of."""
