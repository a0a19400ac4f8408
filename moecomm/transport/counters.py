"""Counting arrivals by immediate, without I/O: what makes any order of delivery look alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moecomm.errors import ConfigError, StateError


class ArrivalCounter:
    """Calls back once an immediate has arrived as often as somebody expects."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._wanted: dict[int, tuple[int, Callable[[], None]]] = {}
        self._due: list[Callable[[], None]] = []

    def expect(self, imm: int, count: int, notify: Callable[[], None]) -> None:
        """See ``Transfer.expect``. ``notify`` waits for ``settle``, also when all is there."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"count={count!r}: must be an integer from 1")
        if imm in self._wanted:
            raise StateError(f"imm={imm}: is expected already; one expectation at a time")
        self._wanted[imm] = count, notify
        self._check(imm)

    def arrive(self, imm: int) -> None:
        """Count one arrival; early ones count too."""
        self._seen[imm] += 1
        self._check(imm)

    def seen(self, imm: int) -> int:
        """Arrivals of ``imm`` that no expectation has used up."""
        return self._seen[imm]

    def settle(self) -> int:
        """Make the calls that are due; how many."""
        due, self._due = self._due, []
        for notify in due:
            notify()
        return len(due)

    def _check(self, imm: int) -> None:
        if imm not in self._wanted:
            return
        count, notify = self._wanted[imm]
        if self._seen[imm] < count:
            return
        del self._wanted[imm]
        self._seen[imm] -= count
        if not self._seen[imm]:
            del self._seen[imm]  # immediates come from a large space: keep no zeros
        self._due.append(notify)
