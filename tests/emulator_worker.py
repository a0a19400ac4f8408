"""One rank of ``test_emulator_process.py``, a process of its own.

``emulator_worker.py ring FILE RANK RANKS STEPS TIMEOUT_S``: ``ring`` of ``schedule.cu`` on memory
shared through FILE; prints what each step reports. ``emulator_worker.py build``: builds the program
and runs one kernel of it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path

import numpy as np
from emulator_programs import program
from emulator_ring import WORDS

from moecomm.emulator import ProcessWorld


def ring(file: str, rank: int, num_ranks: int, steps: int, timeout_s: float) -> None:
    with Path(file).open("r+b") as stream:
        shared = mmap.mmap(stream.fileno(), 0)
    memory = np.frombuffer(shared, np.uint64).reshape(num_ranks, num_ranks, WORDS)
    out = np.zeros(8, np.uint64)
    with ProcessWorld(program("schedule")) as world:
        for epoch in range(1, steps + 1):
            # A rank may be up to num_ranks - 1 steps ahead of the one that it writes to.
            rows = [row.ctypes.data for row in memory[epoch % num_ranks]] + [0] * (8 - num_ranks)
            tail = (out.ctypes.data, rank, num_ranks, epoch, int(timeout_s * 1e9))
            world.launch("ring", struct.pack("13Q", *rows, *tail), 1, 64)
            expected = [sum(epoch * 100 + i for i in range(w, w + 32)) for w in (0, 32)]
            right = out[2:4].tolist() == expected
            sys.stdout.write(f"{epoch} {int(out[0])} {int(right)} {int(out[1])}\n")
            if not out[0]:
                break


def build() -> None:
    with ProcessWorld(program("primitives"), (1, 2)) as world:
        out = np.zeros(4, np.uint32)
        args = struct.pack("3Q4I", *[out.ctypes.data] * 3, 0, 0, 0, 0)
        world.launch("configured", args, 1, 1)
        sys.stdout.write(f"{out[0]}\n")


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build()
    else:
        name, rank, num_ranks, steps, timeout_s = sys.argv[2:]
        ring(name, int(rank), int(num_ranks), int(steps), float(timeout_s))
