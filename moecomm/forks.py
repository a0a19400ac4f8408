"""What a forked child must put right before anything else of it runs."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What ``tell`` takes."""

    def after_fork_in_child(self) -> None:
        """Runs in a forked child, before ``os.fork`` returns there. Must not wait."""


_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell(item: Forked) -> None:
    """Call ``item.after_fork_in_child`` in every child that is forked while ``item`` lives."""
    _told.add(item)


def _after_fork_in_child() -> None:
    for item in list(_told):
        item.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
