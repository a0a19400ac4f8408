"""What a simulation or an emulated kernel can find wrong, beyond the package's other errors."""

from __future__ import annotations

from typing import Any

from moecomm.errors import MoecommError


class EmulatorError(MoecommError):
    """An emulated kernel broke a rule; ``report`` says where.

    ``kind`` is a short name of the rule, ``rank`` the rank that broke it, ``report`` the full
    text: kernel, rank, block, thread, and the accesses or waits involved.
    """

    def __init__(self, kind: str, rank: int, report: str) -> None:
        super().__init__(f"{kind}: {report}")
        self.kind = kind
        self.rank = rank
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.rank, self.report)


class Deadlock(EmulatorError):
    """No thread can go on, or none did within the step limit. ``report`` lists who waits where."""


class CheckFailure(EmulatorError):
    """A check found a mistake in a kernel: a race, a stale or uninitialised read, divergence."""
