"""What a probe reports: one line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """``ok``: works. ``absent``: optional, not here. ``bad``: here, and does not work."""

    ok = "ok"
    absent = "absent"
    bad = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    ``fix`` is the command (or the one thing to do) that helps; empty where nothing is needed or
    nothing can be done. ``required``: without it not even the CPU path works.
    """

    topic: str
    name: str
    state: State
    detail: str
    fix: str = ""
    required: bool = False

    @property
    def fatal(self) -> bool:
        """Whether the CPU path cannot work because of this."""
        return self.required and self.state is not State.ok


def ok(topic: str, name: str, detail: str, *, required: bool = False) -> Finding:
    return Finding(topic, name, State.ok, detail, required=required)


def absent(topic: str, name: str, detail: str, fix: str = "", *, required: bool = False) -> Finding:
    return Finding(topic, name, State.absent, detail, fix, required)


def bad(topic: str, name: str, detail: str, fix: str = "", *, required: bool = False) -> Finding:
    return Finding(topic, name, State.bad, detail, fix, required)


def size_text(nbytes: int) -> str:
    """Return ``nbytes`` in a unit that leaves at most four digits: "64 KiB"."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
