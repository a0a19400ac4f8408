"""A store inside one process: for a group of one, and for ranks that are threads."""

from __future__ import annotations

import threading

from moecomm.store_wire import LONGEST_WAIT_S


class LocalStore:
    """The ``Store`` protocol over a dictionary. Any number of threads may use it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Set ``key``; whoever waits for it goes on."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, or ``TimeoutError`` when it is not set within ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self._values, min(max(0.0, timeout_s), LONGEST_WAIT_S)
            ):
                raise TimeoutError(f"store key {key!r} was not set in {timeout_s:g} s")
            return self._values[key]

    def add(self, key: str, n: int) -> int:
        """Add ``n`` to the counter ``key`` (absent: 0) and return the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + n
            self._values[key] = b"%d" % total
            self._changed.notify_all()
            return total

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens when it is absent."""
        with self._changed:
            self._values.pop(key, None)
