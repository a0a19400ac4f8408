"""What the compiler reports about each kernel: registers, stack, spills, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel's needs, from ``ptxas -v`` and the cubin's section table.

    Spills include those of functions that the kernel calls; ``stack_bytes`` is what a thread may
    need at most, calls included. ``shared_bytes`` is static shared memory only;
    ``constant_bytes`` is the kernel's constant bank, which holds its arguments.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    constant_bytes: int

    @property
    def spills(self) -> bool:
        """Whether registers were spilled to memory."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


_ENTRY: Final = re.compile(r"Compiling entry function '([^']+)'")
_FRAME: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_CUMULATIVE: Final = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED: Final = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


def parse_report(log: str, sections: Mapping[str, int]) -> dict[str, Resources]:
    """Return kernel name → resources from a ``ptxas -v`` log and the cubin's section sizes.

    The log names a kernel, then gives its frame and registers, then the frames of the functions
    that were compiled for it.
    """
    found: dict[str, Resources] = {}
    blocks = re.split(r"(?=Compiling entry function)", log)
    for block in blocks:
        entry = _ENTRY.search(block)
        if entry is not None:
            found[entry[1]] = _kernel(block, sections.get(f".nv.constant0.{entry[1]}", 0))
    return found


def _kernel(block: str, constant_bytes: int) -> Resources:
    frames = [tuple(map(int, match)) for match in _FRAME.findall(block)]
    shared = _SHARED.search(block)
    own_frame = frames[0][0] if frames else 0
    return Resources(
        registers=_first(_REGISTERS, block),
        stack_bytes=max(own_frame, _first(_CUMULATIVE, block)),
        spill_store_bytes=sum(stores for _, stores, _ in frames),
        spill_load_bytes=sum(loads for _, _, loads in frames),
        shared_bytes=sum(int(part or 0) for part in shared.groups()) if shared else 0,
        constant_bytes=constant_bytes,
    )


def _first(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0
