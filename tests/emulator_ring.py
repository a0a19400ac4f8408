"""Memory and launches of ``schedule.cu`` for the tests of simulations and processes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from emulator_programs import program

WORDS = 2 + 64


class Ring:
    """Every rank's flag, counter and payload, and its results."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.memory = np.zeros((num_ranks, WORDS), np.uint64)
        self.out = np.zeros((num_ranks, 8), np.uint64)

    def args(self, rank: int, epoch: int = 1, timeout_s: float = 0) -> bytes:
        rows = [row.ctypes.data for row in self.memory] + [0] * (8 - self.num_ranks)
        out = self.out[rank].ctypes.data
        return struct.pack("13Q", *rows, out, rank, self.num_ranks, epoch, int(timeout_s * 1e9))

    def register(self, simulation: Any, rank: int) -> None:
        base = self.memory[rank].ctypes.data
        simulation.register(rank, base, 16, "input", "flags")
        simulation.register(rank, base + 16, 64 * 8, "symmetric", "payload")

    def launch(
        self, group: Any, kernel: str, epoch: int = 1, timeout_s: float = 0, **defines: int
    ) -> None:
        args = self.args(group.rank, epoch, timeout_s)
        built = program("schedule", **defines)
        group.simulation.launch(group.rank, built, [], kernel, args, 1, 64)

    def step(
        self, group: Any, kernel: str = "ring", timeout_s: float = 0, **defines: int
    ) -> list[int]:
        """One ``kernel`` on this rank, all ranks having come; its results."""
        self.register(group.simulation, group.rank)
        group.barrier()
        self.launch(group, kernel, timeout_s=timeout_s, **defines)
        return [int(v) for v in self.out[group.rank]]

    def step_alone(self, group: Any, kernel: str, timeout_s: float = 0) -> list[int]:
        """``step`` without the others."""
        self.register(group.simulation, group.rank)
        self.launch(group, kernel, timeout_s=timeout_s)
        return [int(v) for v in self.out[group.rank]]

    def step_named(self, group: Any, defines: dict[str, int]) -> list[int]:
        return self.step(group, **defines)

    @property
    def sums(self) -> list[int]:
        """What ``ring`` reports of epoch 1's payload, per warp."""
        return [sum(100 + i for i in range(32)), sum(100 + i for i in range(32, 64))]
