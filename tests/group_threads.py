"""Groups of a test's own: ranks as threads that may fail, and a port for a store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from moecomm.group import Group
from moecomm.store_local import LocalStore


def free_port() -> int:
    """A port with room above it that nobody uses right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return min(int(probe.getsockname()[1]), 65000)


def in_threads(size: int, work: Callable[[Group], Any], store: Any = None) -> list[Any]:
    """``work`` on every rank, each a thread; results, or the error that a rank raised, by rank."""
    store = store or LocalStore()
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(Group(rank, size, store))
        except Exception as error:  # noqa: BLE001  the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def without_errors(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
