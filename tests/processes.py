"""Find processes that a test started, however deep, by a mark in their environment."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

VARIABLE = "MOECOMM_TEST_MARK"


def new_mark() -> str:
    """A value for ``VARIABLE`` that no other process has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Processes that have inherited the mark and still run (zombies do not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if f"{VARIABLE}={mark}".encode() in environ.split(b"\0") and state not in "ZX":
            found.append(int(entry.name))
    return found


def wait_until_gone(mark: str, timeout_s: float = 5.0) -> list[int]:
    """The marked processes that are still there after ``timeout_s``: hopefully none."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def descriptors() -> int:
    """How many this process has open; 0 where that cannot be told."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
