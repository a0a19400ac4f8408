"""``Simulation``: all ranks in this process, under one scheduler, in one order for a seed.

Each rank's function runs in a thread of its own (``hosts.py``). A kernel launch hands the kernel
to the scheduler; the kernels of all ranks run, thread by thread, whenever no rank's host code can
go on. Time is the simulation's own and jumps over waits.

What it costs (2026-11-30, g++ 12, one hyperthread of a busy 2-core Xeon, best of three):

====================================================  ==========  ==========
dispatch + combine of one simulation, CPU seconds      no checks    checks
====================================================  ==========  ==========
3 ranks, 4 blocks of 64, 64 tokens x 512, top 8 of 24     0.2        0.6-1.1
4 ranks, 4 blocks of 64, 128 tokens x 7168, top 8 of 32   2.6-4.5     16-28
====================================================  ==========  ==========

A thread switch costs 25-30 ns, so ``__syncthreads`` of 64 threads 1.6-1.8 us and a warp collective
1.0 us. Without checks, ``ld_v4`` + ``st_v4`` of 16 bytes run at 70 M/s, plain copies at 100 M/s.
Checks take about 40 bytes of memory for each 4 bytes that are touched, and per granule and access
20-40 ns; a kernel's first launch with them is compiled apart (about as long again).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

from moecomm.emulator import native
from moecomm.emulator.faults import Faults
from moecomm.emulator.hosts import Hosts
from moecomm.emulator.program import EmulatorProgram
from moecomm.emulator.simulation_store import SimulationStore, Values
from moecomm.emulator.turns import Turns, Wait
from moecomm.emulator.world import World, checked_launch
from moecomm.errors import ConfigError, StateError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Checks = bool | Literal["strict"]
RangeKind = Literal["symmetric", "local", "input"]
RANGE_KINDS: Final[tuple[RangeKind, ...]] = ("symmetric", "local", "input")
CHECK_LEVELS: Final = {False: 0, True: 1, "strict": 2}


class Simulation:
    """``num_ranks`` ranks in one process.

    Args:
        num_ranks: 1 to 1024.
        seed: 0 schedules fairly; any other seed is one unfair schedule, always the same.
        checks: look at every access of the kernels to shared memory and to registered memory
            (see ``register``). ``"strict"``: shuffles, votes and matches of a warp order no
            memory, which is what CUDA promises; else they order like ``__syncwarp``.
        faults: what goes wrong on purpose.
        max_steps: thread switches after which the run counts as hung; ``None``: two billion
            (minutes) in which no launch begins or ends. Waits that only a timeout of more than an
            hour could end are found at once, without it.

    Use ``run`` once. ``launch``, ``register`` and the store are for the ranks' functions.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        seed: int = 0,
        checks: Checks = True,
        faults: Faults | None = None,
        max_steps: int | None = None,
    ) -> None:
        if not 1 <= num_ranks <= 1024:
            raise ConfigError(f"num_ranks={num_ranks}: must be from 1 to 1024")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed={seed}: must be from 0 to 2**64-1")
        if checks not in CHECK_LEVELS:
            raise ConfigError(f"checks={checks!r}: must be True, False or 'strict'")
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: must be at least 1, or None")
        self.num_ranks = num_ranks
        self.seed = seed
        self.checks = bool(checks)
        self.faults = faults if faults is not None else Faults()
        self._world = World(self._options(CHECK_LEVELS[checks], max_steps or 0))
        self._hosts = Hosts(num_ranks)
        self._values = Values(self._world)
        self._started = False

    def _options(self, checks: int, max_steps: int) -> native.Options:
        faults = self.faults
        return native.Options(
            num_ranks=self.num_ranks,
            simulation=1,
            seed=self.seed,
            max_steps=max_steps,
            checks=checks,
            dead_rank=native.NO_RANK if faults.dead_rank is None else faults.dead_rank,
            delay_stores=faults.delay_stores,
            dead_after_steps=faults.dead_after_steps,
            drop_nth_release=faults.drop_nth_release or 0,
            duplicate_release=faults.duplicate_release or 0,
        )

    # ---- for the caller ------------------------------------------------------------------------

    def run(self, call: Callable[[int], T]) -> list[T | None]:
        """Call ``call(rank)`` for every rank, in one thread each; return the results by rank.

        The first error that a rank raises ends the run: the other ranks are unwound where they
        wait, and it is raised here with a note that names the rank and the seed. The result of a
        rank that a fault stopped is ``None``.
        """
        if self._started:
            raise StateError("a Simulation runs once; make another one")
        self._started = True
        turns = Turns(self._hosts, self._world, self._values, self.seed)
        try:
            turns.run([_bind(call, rank) for rank in range(self.num_ranks)])
        finally:
            stubborn = self._hosts.unwind()
            if stubborn:
                logger.warning("threads of ranks %s of a simulation did not end", stubborn)
            self._world.close()
        if turns.failure is not None:
            rank, error = turns.failure
            how = "fair schedule" if self.seed == 0 else f"seed {self.seed}"
            error.add_note(f"rank {rank} of {self.num_ranks} in a simulation, {how}")
            raise error
        return [turns.ended[rank].result for rank in range(self.num_ranks)]

    @property
    def time_ns(self) -> int:
        """The simulation's time."""
        return self._world.time_ns

    # ---- for the ranks --------------------------------------------------------------------------

    def launch(
        self,
        rank: int,
        program: EmulatorProgram,
        config: Sequence[int],
        kernel: str,
        args: bytes,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` to its end, on the rank whose thread this is.

        ``args`` are the bytes of its argument struct. ``rank`` is the caller's number in its
        group, which for a subgroup is not its number here; so it is not used.

        Raises:
            ConfigError: unknown kernel, wrong size of ``args``, impossible launch shape.
            CompileError: the program does not compile.
            StateError: called outside of the ranks' threads.
            Deadlock: no thread of any rank can go on, or the step limit is reached.
            CheckFailure: a check found a mistake.
        """
        instrumented = self.checks or self.faults.touch_accesses
        entry = program.entry(kernel, len(args), checks=instrumented)
        launch = checked_launch(entry, args, config, grid, block, shared_bytes)
        self._hosts.ask(launch)

    def register(self, rank: int, address: int, nbytes: int, kind: RangeKind, name: str) -> None:
        """Name ``nbytes`` of memory of the calling thread's rank, for reports and checks.

        Checks watch the accesses to registered memory. ``kind`` says what they may read:
        ``"symmetric"``: only what a kernel with the same ``note_epoch`` wrote; ``"local"``: only
        what has been written at all, and by this rank alone; ``"input"``: everything, since the
        host has filled or zeroed it. Flags and counters, which are accessed atomically, may be
        read from the start in every kind. Bytes that were registered before are forgotten first.
        """
        if kind not in RANGE_KINDS:
            raise ConfigError(f"kind={kind!r}: must be one of {', '.join(RANGE_KINDS)}")
        self._world.register(self._own(rank), address, nbytes, RANGE_KINDS.index(kind), name)

    def mark_written(self, rank: int, address: int, nbytes: int) -> None:
        """Tell the checks that the host of the calling thread's rank wrote these bytes just now."""
        self._world.mark_written(self._own(rank), address, nbytes)

    def store(self, rank: int) -> SimulationStore:
        """The store of the host side, as seen by ``rank``."""
        return SimulationStore(self._values, rank, self._wait)

    def _wait(self, rank: int, key: str, timeout_s: float) -> bytes:
        deadline = self.time_ns + int(timeout_s * 1e9)
        value: bytes = self._hosts.ask(Wait(key, deadline))
        return value

    def _own(self, rank: int) -> int:
        """The calling thread's rank; ``rank``, given by somebody else, is taken at its word."""
        own = self._hosts.own_rank()
        return rank if own is None else own


def _bind(call: Callable[[int], T], rank: int) -> Callable[[], T]:
    return lambda: call(rank)
