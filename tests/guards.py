"""What a kernel must not have written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from exchange import Case, used_rows

import moecomm as mc
from moecomm.runtime.cpu import POISON

Array = np.ndarray[Any, Any]


def memory(address: int, nbytes: int) -> Array:
    """``nbytes`` of this process's memory, as they are now."""
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def gaps(comm: mc.MoeComm) -> Iterator[tuple[str, Array]]:
    """The bytes between the regions of both arenas, with the name of the region before."""
    run, layout = comm._runtime, comm.layout
    for base, arena in ((run.symmetric, layout.symmetric), (run.local, layout.local)):
        regions = list(arena)
        ends = [*(r.offset for r in regions[1:]), arena.nbytes]
        for region, end in zip(regions, ends, strict=True):
            start = region.offset + region.nbytes
            yield region.name, memory(base + start, end - start)


def check_gaps(comm: mc.MoeComm) -> None:
    """Nothing was ever written between regions."""
    for name, found in gaps(comm):
        assert not found.any(), f"written after the end of {name}"


def check_unused_rows(comm: mc.MoeComm, case: Case | None, recv_slot: int) -> None:
    """In a slot that was poisoned and used once, rows that nobody sent are as they were; of
    ``recv.x`` with ``case`` ``None`` (an overflow): all of them."""
    layout = comm.layout
    region = layout.local["x"]
    x = memory(
        comm._runtime.local + region.offset + recv_slot * layout.recv_slot_bytes,
        layout.recv_slot_bytes,
    )
    rows = x[: layout.recv_rows * layout.wire_row_bytes]
    rows = rows.reshape(layout.recv_rows, layout.wire_row_bytes)
    used = np.zeros(layout.recv_rows, bool)
    if case is not None:
        used = used_rows(case, comm.group.rank).reshape(-1)
    assert (rows[~used] == POISON).all(), "a row that nobody sent was written"
    rest = x[layout.recv_rows * layout.wire_row_bytes :]
    assert (rest == POISON).all(), "written after the last row"
