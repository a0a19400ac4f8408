"""Ranks as threads of this process, each with a group over one in-memory store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import moecomm as mc
from moecomm.store_local import LocalStore


def run_threads(
    fn: Callable[..., Any], num_ranks: int, *args: Any, device: str | None = None
) -> list[Any]:
    """``fn(group, *args)`` on every rank; results in rank order; the first error is raised."""
    store = LocalStore()
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [
            pool.submit(fn, mc.Group(rank, num_ranks, store, device=device), *args)
            for rank in range(num_ranks)
        ]
        return [future.result() for future in ranks]
