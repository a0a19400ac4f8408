"""NVSHMEM's host library without a GPU: heaps are files that the ranks' processes map.

With ``tests/fake_cuda.py`` underneath, the transport's own logic runs as it is.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moecomm.transport import nvshmem_heap, nvshmem_library

HEAP_BYTES = 64 << 20


class FakeLibrary:
    """``folder``: where the heaps are. ``apart``: PEs whose heap nobody else maps. ``late_s``:
    what starting and stopping take."""

    version = (3, 4, 5)
    path = "libnvshmem_host.so.3"

    def __init__(
        self,
        folder: Path,
        *,
        apart: tuple[int, ...] = (),
        late_s: float = 0,
        room: int = HEAP_BYTES,
    ) -> None:
        self.folder, self.apart, self.late_s, self.room = folder, apart, late_s, room
        self.calls: Counter[str] = Counter()
        self.modules: list[Any] = []
        self.pe = -1
        self._used = 0
        self._maps: dict[int, np.ndarray] = {}

    def unique_id(self) -> bytes:
        self.calls["unique_id"] += 1
        return b"\x01" + bytes(127)

    def init(self, rank: int, size: int, unique_id: bytes) -> None:
        self.calls["init"] += 1
        assert len(unique_id) == 128
        time.sleep(self.late_s)
        self.pe = rank
        with (self.folder / f"pe{rank}").open("wb") as file:
            file.truncate(HEAP_BYTES)

    def finalize(self) -> None:
        self.calls["finalize"] += 1
        time.sleep(self.late_s)
        self._used = 0
        self._maps.clear()

    def allocate(self, nbytes: int) -> int:
        self.calls["allocate"] += 1
        if self._used + nbytes > self.room:
            return 0
        self._used += nbytes
        return self._base(self.pe) + self._used - nbytes

    def free(self, address: int) -> None:
        self.calls["free"] += 1

    def pointer(self, address: int, pe: int) -> int:
        if pe != self.pe and (pe in self.apart or self.pe in self.apart):
            return 0
        return self._base(pe) + address - self._base(self.pe)

    def module_init(self, module: Any) -> None:
        self.modules.append(module)

    def module_finalize(self, module: Any) -> None:
        self.modules.remove(module)

    def _base(self, pe: int) -> int:
        if pe not in self._maps:
            with (self.folder / f"pe{pe}").open("r+b") as file:
                self._maps[pe] = np.frombuffer(mmap.mmap(file.fileno(), HEAP_BYTES), np.uint8)
        return int(self._maps[pe].ctypes.data)


@contextmanager
def played(library: FakeLibrary) -> Iterator[FakeLibrary]:
    """This process has ``library``, and has not started it."""
    before, load = nvshmem_heap._heap, nvshmem_library.load
    nvshmem_heap._heap = None
    nvshmem_library.load = lambda: library  # type: ignore
    try:
        yield library
    finally:
        nvshmem_heap._heap, nvshmem_library.load = before, load
