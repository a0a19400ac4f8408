"""Commands as bytes: what Python puts into the submission ring (``POST`` records)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moecomm.errors import ConfigError
from moecomm.transport.engine import records as R
from moecomm.transport.engine.operations import Queued

MASK: Final = (1 << 64) - 1
_POST: Final = struct.Struct("<IHBBIIQQQQQQ")
_CONTEXT: Final = struct.Struct("<I")
_ROW: Final = np.dtype(
    {
        "names": ["peer", "nic", "kind", "flags", "imm", "local", "local_key", "nbytes",
                  "remote", "remote_key"],
        "formats": ["u4", "u2", "u1", "u1", "u4", "u8", "u8", "u8", "u8", "u8"],
        "offsets": [R.POST_PEER, R.POST_NIC, R.POST_KIND, R.POST_FLAGS, R.POST_IMM, R.POST_LOCAL,
                    R.POST_LOCAL_KEY, R.POST_NBYTES, R.POST_REMOTE, R.POST_REMOTE_KEY],
        "itemsize": R.POST_BYTES,
    }
)  # fmt: skip
assert _POST.size == R.POST_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a write as a NIC sees it."""

    address: int
    key: int


class Commands:
    """``count`` commands of one operation, built one by one."""

    __slots__ = ("count", "data", "flag", "operation", "taken", "value")

    def __init__(self, operation: Queued, flag: int = 0, value: int = 0) -> None:
        self.operation = operation
        self.flag = flag  # see OP_FLAG
        self.value = value
        self.data = bytearray()
        self.count = 0
        self.taken = 0  # of them, by the ring

    def add(
        self,
        kind: int,
        peer: int,
        nic: int,
        imm: int | None,
        local: Place,
        nbytes: int,
        remote: Place,
        flags: int = 0,
    ) -> None:
        """Append a command; ``imm`` of ``None``: without one."""
        flags |= 0 if imm is None else R.HAS_IMM
        self.data += _POST.pack(
            peer, nic, kind, flags, imm or 0, 0, local.address & MASK, local.key & MASK, nbytes,
            remote.address & MASK, remote.key & MASK, 0,
        )  # fmt: skip
        self.count += 1

    def add_rows(self, rows: npt.NDArray[Any]) -> None:
        """Append an array of ``write_rows``."""
        self.data += rows.tobytes()
        self.count += len(rows)

    def set_context(self, slot: int) -> None:
        """Name the operation in every command."""
        for at in range(0, len(self.data), R.POST_BYTES):
            _CONTEXT.pack_into(self.data, at + R.POST_CONTEXT, slot)


def write_rows(count: int, imm: int | None) -> npt.NDArray[Any]:
    """``count`` writes as an array with one field per field of a command."""
    rows = np.zeros(count, _ROW)
    rows["kind"] = R.WRITE
    if imm is not None:
        rows["flags"], rows["imm"] = R.HAS_IMM, imm
    return rows


def keys(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Keys, which may be negative as Python sees them, as bit patterns."""
    return np.array([value & MASK for value in values], np.uint64)


def pages(name: str, numbers: npt.ArrayLike, nbytes: int, page_bytes: int) -> npt.NDArray[np.int64]:
    """Page numbers, checked.

    Raises:
        ConfigError: not integers in one dimension, or a page is not inside the region.
    """
    found = np.asarray(numbers)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(f"{name}: must be integers in one dimension, is {found.dtype}")
    inside = nbytes // page_bytes
    if found.size and not 0 <= found.min() <= found.max() < inside:
        raise ConfigError(
            f"{name}: from {found.min()} to {found.max()}; must be from 0 to {inside - 1}"
        )
    return found.astype(np.int64)
