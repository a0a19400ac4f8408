"""Failures of the runtime as exceptions, with code addresses turned into files and lines."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import Final

from moecomm.emulator.errors import CheckFailure, Deadlock, EmulatorError

# FailureKind (checks.hpp): number → name.
KINDS: Final = (
    "none", "deadlock", "divergence", "step limit", "stack overflow", "out of memory",
    "uninitialised read", "stale read", "race", "wrong scope", "misaligned access",
    "access out of range", "foreign access", "kernel error",
)  # fmt: skip
_DEADLOCKS: Final = ("deadlock", "step limit")
_PLACE: Final = re.compile(r" at \[([^\]]+)\+(0x[0-9a-f]+)\]")
_LINE: Final = re.compile(r"([^/]+:\d+)(?: \(discriminator \d+\))?$")
_TOOL_TIMEOUT_S: Final = 10.0


def failure_of(runtime: ctypes.CDLL, world: int | None) -> EmulatorError:
    """Return what stopped ``world`` as an exception."""
    kind = KINDS[runtime.emu_failure_kind(world)]
    report = _with_lines(runtime.emu_failure_text(world).decode(errors="replace"))
    cls = Deadlock if kind in _DEADLOCKS else CheckFailure
    return cls(kind, runtime.emu_failure_rank(world), report)


def _with_lines(report: str) -> str:
    """Replace " at [program+address]" by " at file:line < file:line of its caller ..."."""
    lines: dict[tuple[str, str], str] = {}
    for place in set(_PLACE.findall(report)):
        lines[place] = _line(*place)
    return _PLACE.sub(lambda m: lines[m[1], m[2]], report)


def _line(program: str, address: str) -> str:
    """Return the source lines, innermost first; empty where no tool can tell."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return ""
    try:
        ran = subprocess.run(
            [tool, "-i", "-e", program, address],
            capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = [match[1] for match in map(_LINE.search, ran.stdout.splitlines()) if match]
    return f" at {' < '.join(found)}" if found else ""
