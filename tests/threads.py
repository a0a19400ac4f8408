"""Ranks as threads of this process, each with a group over one in-memory store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import moecomm as mc


class MemoryStore:
    """The store protocol in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(key)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def run_threads(
    fn: Callable[..., Any], num_ranks: int, *args: Any, device: str | None = None
) -> list[Any]:
    """``fn(group, *args)`` on every rank; results in rank order; the first error is raised."""
    store = MemoryStore()
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [
            pool.submit(fn, mc.Group(rank, num_ranks, store, device=device), *args)
            for rank in range(num_ranks)
        ]
        return [future.result() for future in ranks]
