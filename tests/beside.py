"""Streams beside a rank's own, where ranks of ``remote.World`` bounce: one pushes, one pulls.

To the simulation each is a rank of its own: rank r's are 2 n + r and 3 n + r of n ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from typing import Any

from moecomm.emulator.simulation import Simulation
from moecomm.kernels.stages import PULL, PUSH
from moecomm.remote import DOOR_WORDS, HALVES, WORD
from moecomm.remote_words import TICKET_BITS, Door, RemoteWords

TURNS = 10_000  # of a pull that finds nothing


def push(world: Any, simulation: Simulation, number: int) -> None:
    """What each sending half asks for."""
    rank, store = number % len(world.nodes), simulation.store(number)
    for n, stage, args in _asked(world, simulation, number):
        run = world.runtimes[rank]
        words = RemoteWords(run._layout.areas, rank)
        if n == 1:
            _own(simulation, number, run, "push_parts", 4, 8)
        half, door = (1, Door.ROWS) if stage == "combine_send" else (0, Door.HEAD)
        for _ in range(2 if world.beside == "together" else 1):  # the second finds nothing to do
            run._kernels.launch(PUSH[stage], args, 0, 0)
        ticket = run.remote_flags + WORD * words.ticket(args.slot, half)
        found = ctypes.c_uint64.from_address(ticket).value
        if world.beside == "together":
            rung = run.read_words("rung")[args.slot * DOOR_WORDS + door]
            assert found == n << TICKET_BITS | int(rung)
        store.set(f"pushed {rank} {n}", b"done")


def pull(world: Any, simulation: Simulation, number: int) -> None:
    """Pull until it has come; "late": three times, whenever that is."""
    rank, store = number % len(world.nodes), simulation.store(number)
    uses: Counter[int] = Counter()  # of each half of each slot: its epoch
    for n, stage, args in _asked(world, simulation, number):
        run = world.runtimes[rank]
        if n == 1:
            _own(simulation, number, run, "pull_parts", 4, 8)
            here = run._layout.local["pull_here"]
            at = run.local + here.offset
            simulation.register(number, at, here.nbytes, "input", here.name)
        store.get(f"pushed {rank} {n}", 1e6)
        word = args.slot * HALVES + (stage == "combine_send")
        uses[word] += 1
        for turn in range(TURNS):
            run._kernels.launch(PULL[stage.replace("send", "recv")], args, 0, 0)
            done = run.read_words("pulled")[word] >= uses[word]
            if done or (turn == 2 and world.beside == "late"):
                break
            with contextlib.suppress(TimeoutError):
                store.get("a pause", 1e-6)  # the others go on
        else:
            raise AssertionError(f"rank {rank}: nothing to pull in {TURNS} turns")


def _asked(world: Any, simulation: Simulation, number: int) -> Any:
    rank, n = number % len(world.nodes), 1
    while True:
        simulation.store(number).get(f"asked {rank} {n}", 1e6)
        if world.asked[rank, n] is None:
            return
        yield n, *world.asked[rank, n]
        n += 1


def _own(
    simulation: Simulation, number: int, run: Any, counters: str, first: int, step: int
) -> None:
    """Its counters are this one's; what a rank shares with its streams is not that rank's alone."""
    local = run._layout.local
    for offset in range(first, local[counters].nbytes, step):
        at = run.local + local[counters].offset + offset
        simulation.register(number, at, 4, "input", f"{counters} beside")
    for name in ("staged_first", "return_base", "return_count", "pull_count"):
        at = run.local + local[name].offset
        simulation.register(number, at, local[name].nbytes, "input", name)
