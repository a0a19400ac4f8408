"""Programs of ``tests/emulator_kernels`` and what the tests need to drive them."""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from moecomm import Group
from moecomm.emulator import EmulatorProgram

KERNELS = Path(__file__).parent / "emulator_kernels"
MUTATIONS = {
    "none": 0,
    "missing release": 1,
    "missing acquire": 2,
    "dropped barrier": 3,
    "dropped syncwarp": 4,
    "reuse before ack": 5,
    "stale word": 6,
    "unwritten word": 7,
    "shuffle only": 8,
}


@functools.cache
def program(name: str, **defines: int) -> EmulatorProgram:
    """The kernels of ``name``.cu, with ``defines`` ahead of them."""
    lines = [f"#define {key} {value}" for key, value in defines.items()]
    text = (KERNELS / f"{name}.cu").read_text()
    source = "\n".join([*lines, f'#line 1 "{name}.cu"', text])
    made_by_macro = re.findall(r"^WARP_KERNEL\((\w+)", text, re.MULTILINE)
    if not made_by_macro:
        return EmulatorProgram(source, name=name)
    return EmulatorProgram(
        source, name=name, kernels=[*EmulatorProgram(source).kernels, *made_by_macro]
    )


class Exchange:
    """Memory of all ranks for ``exchange.cu``, and one rank's steps."""

    def __init__(self, num_ranks: int, words: int = 40) -> None:
        self.num_ranks, self.words = num_ranks, words
        self.slots = np.zeros((num_ranks, num_ranks, words), np.uint32)
        self.flags = np.zeros((num_ranks, num_ranks), np.uint64)
        self.acks = np.zeros((num_ranks, num_ranks), np.uint64)
        self.out = np.zeros((num_ranks, num_ranks, words), np.uint32)
        self.tickets = np.zeros((num_ranks, 32), np.uint32)

    def register(self, simulation: Any, rank: int) -> None:
        for array, kind, name in (
            (self.slots, "symmetric", "slots"),
            (self.flags, "input", "flags"),
            (self.acks, "input", "acks"),
            (self.out, "local", "out"),
            (self.tickets, "input", "ticket"),
        ):
            row = array[rank]
            simulation.register(rank, row.ctypes.data, row.nbytes, kind, name)

    def args(self, rank: int, epoch: int) -> bytes:
        words = []
        for array in (self.slots, self.flags, self.acks):
            rows = [array[r].ctypes.data for r in range(self.num_ranks)]
            words += rows + [0] * (8 - self.num_ranks)
        words += [self.out[rank].ctypes.data, self.tickets[rank].ctypes.data, rank, epoch]
        return struct.pack("28Q", *words)

    def expected(self, rank: int, epoch: int) -> np.ndarray:
        source = np.arange(self.num_ranks)[:, None]
        word = np.arange(self.words)[None, :]
        return (((epoch * 8 + source) * 8 + rank) * 65536 + word).astype(np.uint32)

    def step(
        self, group: Group, epoch: int, mutation: int, sender: str = "send", grid: int = 3
    ) -> None:
        simulation, rank = group.simulation, group.rank
        built = program("exchange", MUTATION=mutation)
        config, args = [self.num_ranks, self.words], self.args(rank, epoch)
        simulation.launch(rank, built, config, sender, args, grid, 64)
        simulation.launch(rank, built, config, "receive", args, grid, 64)


def run_exchange(
    group: Group, exchange: Exchange, epochs: int, mutation: int = 0, sender: str = "send"
) -> list[np.ndarray]:
    """What ``group``'s rank received in each epoch."""
    exchange.register(group.simulation, group.rank)
    group.barrier()
    received = []
    for epoch in range(1, epochs + 1):
        exchange.step(group, epoch, mutation, sender)
        received.append(exchange.out[group.rank].copy())
    return received
