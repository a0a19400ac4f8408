"""Parts of ``moecomm.group`` that hold no group: message packing, and who closes the store."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Final

_LENGTH: Final = struct.Struct("!I")


class Lifetime:
    """Counts the open groups that share a store; the last one closes it."""

    def __init__(self, on_close: Callable[[], None] | None) -> None:
        self._on_close = on_close
        self._open = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._open += 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last and self._on_close is not None:
            self._on_close()


def pack_missing(missing: list[int]) -> bytes:
    return b"m" + b",".join(b"%d" % r for r in missing)


def pack_values(values: dict[int, bytes]) -> bytes:
    parts = [b"v"]
    for rank in range(len(values)):
        parts += _LENGTH.pack(len(values[rank])), values[rank]
    return b"".join(parts)


def unpack_values(data: bytes) -> list[bytes]:
    values, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        values.append(data[at : at + length])
        at += length
    return values
