"""Failures of the runtime as exceptions."""

from __future__ import annotations

import ctypes
from typing import Final

from moecomm.emulator.errors import CheckFailure, Deadlock, EmulatorError

# FailureKind (checks.hpp): number → name.
KINDS: Final = (
    "none", "deadlock", "divergence", "step limit", "stack overflow", "out of memory",
    "uninitialised read", "stale read", "race", "wrong scope", "misaligned access",
    "access out of range",
)  # fmt: skip
_DEADLOCKS: Final = ("deadlock", "step limit")


def failure_of(runtime: ctypes.CDLL, world: int | None) -> EmulatorError:
    """Return what stopped ``world`` as an exception."""
    kind = KINDS[runtime.emu_failure_kind(world)]
    report = runtime.emu_failure_text(world).decode(errors="replace")
    cls = Deadlock if kind in _DEADLOCKS else CheckFailure
    return cls(kind, runtime.emu_failure_rank(world), report)
