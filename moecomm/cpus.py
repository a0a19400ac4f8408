"""The processors of this process."""

from __future__ import annotations

import os


def allowed() -> frozenset[int]:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
