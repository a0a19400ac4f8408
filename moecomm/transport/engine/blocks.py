"""Host memory at fixed addresses, and the C library's functions by address."""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from pathlib import Path
from typing import Final

from moecomm.errors import ConfigError, OutOfMemory
from moecomm.transport.base import Region

_MAPS: Final = Path("/proc/self/maps")


class Block:
    """Zeroed, page-aligned memory of this process, as bytes, words and an address."""

    def __init__(self, nbytes: int) -> None:
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._map = mmap.mmap(-1, size)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(nbytes, 0, "this machine") from error
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.nbytes = size
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")

    def put(self, offset: int, layout: str, *values: int) -> None:
        """``struct.pack_into`` at ``offset``."""
        struct.pack_into(layout, self._map, offset, *values)


class Parts:
    """Named parts of one block, each on cache lines of its own."""

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}
        self._nbytes = 0
        self._block: Block | None = None

    def add(self, name: str, nbytes: int) -> None:
        """Reserve a part; before ``allocate``."""
        self._offsets[name] = self._nbytes
        self._nbytes += -(-nbytes // 128) * 128

    def allocate(self) -> Block:
        """The block that holds all parts."""
        self._block = Block(self._nbytes)
        return self._block

    def offset(self, name: str) -> int:
        """Where a part lies in the block."""
        return self._offsets[name]

    def address(self, name: str) -> int:
        """Where a part lies in memory."""
        assert self._block is not None
        return self._block.address + self._offsets[name]


@functools.cache
def c_address(name: str) -> int:
    """Address of a function of the C library in this process."""
    function = getattr(ctypes.CDLL(None), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def check_mapped(region: Region) -> None:
    """Raise ``ConfigError`` unless all of ``region`` is memory of this process.

    Some libraries register whatever they are given, and fail or crash at the first access.
    """
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return  # not Linux, or hidden: the library has the word
    reached, end = region.address, region.address + region.nbytes
    for line in lines:
        low, _, high = line.split(" ", 1)[0].partition("-")
        if int(low, 16) <= reached < int(high, 16):
            reached = int(high, 16)
            if reached >= end:
                return
    raise ConfigError(
        f"region: {region.nbytes} bytes at {region.address:#x}; must be memory of this process"
    )
