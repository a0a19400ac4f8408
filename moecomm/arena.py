"""Named byte ranges, laid out one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

ALIGN: Final = 128  # a cache line: no two regions share one


@dataclass(frozen=True, slots=True)
class Region:
    """A named byte range of an arena.

    ``poison``: contents mean nothing before they are written. ``payload``: a reader must find what
    was written for its own step.
    """

    name: str
    offset: int
    nbytes: int
    poison: bool
    payload: bool


class Arena:
    """Regions one after the other, each starting on an ``ALIGN`` boundary."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.nbytes = 0

    def add(
        self, name: str, nbytes: int, *, poison: bool = False, payload: bool | None = None
    ) -> None:
        """``payload``: ``None`` means as ``poison``."""
        checked = poison if payload is None else payload
        self.regions[name] = Region(name, self.nbytes, nbytes, poison, checked)
        self.nbytes = round_up(self.nbytes + nbytes, ALIGN)

    def __getitem__(self, name: str) -> Region:
        return self.regions[name]

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions.values())


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
