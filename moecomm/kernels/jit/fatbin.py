"""Which GPU architectures a device archive or object has code for, read without CUDA tools."""

from __future__ import annotations

import struct
from typing import Final

_MAGIC: Final = struct.pack("<I", 0xBA55ED50)
_HEADER: Final = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes of all entries
_ENTRY: Final = struct.Struct(
    "<HHIQIIHHI"
)  # kind, -, header bytes, payload bytes, -, -, -, -, arch
_PTX, _MACHINE_CODE = 1, 2


def archs(data: bytes) -> list[str]:
    """Return architectures in ``data`` (an archive, object or fat binary), ascending.

    ``sm_90`` stands for machine code, ``compute_90`` for PTX. Empty if there is no device code
    that can be recognised.
    """
    found: set[tuple[int, str]] = set()
    start = data.find(_MAGIC)
    while start >= 0:
        found |= _entries(data, start)
        start = data.find(_MAGIC, start + len(_MAGIC))
    return [f"{prefix}_{number}" for number, prefix in sorted(found)]


def _entries(data: bytes, start: int) -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    if start + _HEADER.size > len(data):
        return found
    _, _, header_bytes, nbytes = _HEADER.unpack_from(data, start)
    position = start + header_bytes
    end = min(position + nbytes, len(data))
    while position + _ENTRY.size <= end:
        kind, _, entry_bytes, payload_bytes, *_, number = _ENTRY.unpack_from(data, position)
        if kind in (_PTX, _MACHINE_CODE):
            found.add((number, "sm" if kind == _MACHINE_CODE else "compute"))
        position += max(entry_bytes + payload_bytes, _ENTRY.size)
    return found
