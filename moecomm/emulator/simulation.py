"""``Simulation``: all ranks in this process, under one scheduler, in one order for a seed.

Each rank's function runs in a thread of its own (``hosts.py``). A kernel launch hands the kernel
to the scheduler; the kernels of all ranks run, thread by thread, whenever no rank's host code can
go on. Time is the simulation's own and jumps over waits.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from moecomm.emulator import native
from moecomm.emulator.errors import EmulatorError
from moecomm.emulator.failures import failure_of
from moecomm.emulator.faults import Faults
from moecomm.emulator.hosts import Ended, Hosts, Unwound
from moecomm.emulator.program import EmulatorProgram
from moecomm.emulator.simulation_store import SimulationStore
from moecomm.errors import ConfigError, StateError

logger = logging.getLogger(__name__)

T = TypeVar("T")
RangeKind = Literal["symmetric", "local", "input"]
RANGE_KINDS: Final[tuple[RangeKind, ...]] = ("symmetric", "local", "input")
SLICE_NS: Final = 50_000_000  # how long kernels run before Python may handle a signal


@dataclass(frozen=True, slots=True)
class _Launch:
    """Request: run a kernel to its end."""

    start: Callable[[], int]  # returns the number of the launch


@dataclass(frozen=True, slots=True)
class _Wait:
    """Request: wait for a key."""

    key: str
    deadline_ns: int


class Simulation:
    """``num_ranks`` ranks in one process.

    Args:
        num_ranks: 1 to 1024.
        seed: 0 schedules fairly; any other seed is one unfair schedule, always the same.
        checks: look at every access of the kernels' wrappers to registered memory (see
            ``register``). ``"strict"``: shuffles, votes and matches of a warp order no memory,
            which is what CUDA promises; else they order like ``__syncwarp``.
        faults: what goes wrong on purpose.
        max_steps: thread switches after which the run counts as hung; ``None``: no limit. (Waits
            that only a timeout of more than an hour could end are found without it.)

    Use ``run`` once. ``launch``, ``register`` and the store are for the ranks' functions.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        seed: int = 0,
        checks: bool | Literal["strict"] = True,
        faults: Faults | None = None,
        max_steps: int | None = None,
    ) -> None:
        if not 1 <= num_ranks <= 1024:
            raise ConfigError(f"num_ranks={num_ranks}: must be from 1 to 1024")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed={seed}: must be from 0 to 2**64-1")
        self.num_ranks = num_ranks
        self.seed = seed
        self.checks = bool(checks)
        self.faults = faults if faults is not None else Faults()
        self._runtime = native.runtime()
        options = self._options(2 if checks == "strict" else int(self.checks), max_steps or 0)
        self._world: int | None = self._runtime.emu_create(ctypes.byref(options))
        if not self._world:
            raise MemoryError("no memory for an emulator world")
        self._hosts = Hosts(num_ranks)
        self._order = random.Random(seed)
        self._requests: dict[int, _Launch | _Wait] = {}  # of ranks that wait
        self._launches: dict[int, int] = {}  # number → rank
        self._answers: dict[int, Any] = {}  # of ranks that can go on
        self._ended: dict[int, Ended] = {}
        self._failure: tuple[int, BaseException] | None = None
        self._values: dict[str, bytes] = {}
        self._tokens: dict[str, int] = {}  # key → number for the runtime
        self._numbers = itertools.count()
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
        try:
            self._start(call)
            while self._failure is None and self._go_on():
                pass
            return self._results()
        finally:
            self._close()

    @property
    def time_ns(self) -> int:
        """The simulation's time."""
        return int(self._runtime.emu_time_ns(self._live()))

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
        """Run ``kernel`` on ``rank`` to its end. ``args`` are the bytes of its argument struct.

        Raises:
            ConfigError: unknown kernel, wrong size of ``args``, impossible launch shape.
            CompileError: the program does not compile.
            Deadlock: no thread of any rank can go on, or the step limit is reached.
            CheckFailure: a check found a mistake.
        """
        grid, block = native.dim3("grid", grid), native.dim3("block", block)
        native.check_launch(grid, block, shared_bytes)
        entry = program.entry(kernel, len(args), checks=self.checks or self.faults.touch_accesses)
        words = (ctypes.c_uint64 * max(1, len(config)))(*config)

        def start() -> int:
            number: int = self._runtime.emu_launch(
                self._live(), rank, entry, args, words, len(config),
                (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), shared_bytes,
            )  # fmt: skip
            if number == native.TOO_MANY_THREADS:
                raise ConfigError(
                    f"grid={grid}, block={block}: with checks, the largest launches of all ranks "
                    f"may have {native.MAX_CHECKED_THREADS} threads together"
                )
            if not number:
                raise MemoryError(f"no memory for a launch of {grid} blocks of {block} threads")
            return number

        self._hosts.ask(rank, _Launch(start))

    def register(self, rank: int, address: int, nbytes: int, kind: RangeKind, name: str) -> None:
        """Name ``nbytes`` of memory of ``rank``, for reports and checks.

        Checks watch accesses through the wrappers to registered memory. ``kind`` says what they
        may read: ``"symmetric"``: only what a kernel with the same ``note_epoch`` wrote;
        ``"local"``: only what has been written at all; ``"input"``: everything, since the host
        has filled or zeroed it. Flags and counters, which are accessed atomically, may be read
        from the start in every kind. Bytes that were registered before are forgotten first.
        """
        if kind not in RANGE_KINDS:
            raise ConfigError(f"kind={kind!r}: must be one of {', '.join(RANGE_KINDS)}")
        if not self._runtime.emu_register(
            self._live(), rank, address, nbytes, RANGE_KINDS.index(kind), name.encode()
        ):
            raise MemoryError(f"no memory to register {name}")

    def mark_written(self, rank: int, address: int, nbytes: int) -> None:
        """Tell the checks that the host of ``rank`` has written these bytes just now."""
        if not self._runtime.emu_mark_written(self._live(), rank, address, nbytes):
            raise MemoryError(f"no memory to mark {nbytes} bytes as written")

    def store(self, rank: int) -> SimulationStore:
        """The store of the host side, as seen by ``rank``."""
        return SimulationStore(self, rank)

    def store_set(self, rank: int, key: str, value: bytes) -> None:
        self._values[key] = value
        self._runtime.emu_host_release(self._live(), rank, self._token(key))

    def store_peek(self, rank: int, key: str) -> bytes | None:
        if key in self._values:
            self._runtime.emu_host_acquire(self._live(), rank, self._token(key))
        return self._values.get(key)

    def store_get(self, rank: int, key: str, timeout_s: float) -> bytes:
        if key not in self._values:
            if timeout_s <= 0:
                raise TimeoutError(f"store key {key!r} is not set")
            self._hosts.ask(rank, _Wait(key, self.time_ns + int(timeout_s * 1e9)))
        self._runtime.emu_host_acquire(self._live(), rank, self._token(key))
        return self._values[key]

    def store_delete(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            self._runtime.emu_host_forget(self._live(), self._tokens.pop(key))

    def _token(self, key: str) -> int:
        """The number under which the runtime keeps what the key's writer knew."""
        return self._tokens.setdefault(key, next(self._numbers))

    # ---- the turns -------------------------------------------------------------------------------

    def _start(self, call: Callable[[int], T]) -> None:
        for rank in range(self.num_ranks):
            self._take(rank, self._hosts.start(rank, lambda r=rank: call(r)))  # type: ignore[misc]
            if self._failure is not None:
                return

    def _go_on(self) -> bool:
        """Let one rank's host code run, else kernels, else time. False: nothing is left to do."""
        for rank, request in self._requests.items():
            if isinstance(request, _Wait) and request.key in self._values:
                self._answers.setdefault(rank, None)
        if self._answers:
            ready = sorted(self._answers)
            rank = ready[0] if self.seed == 0 else self._order.choice(ready)
            answer = self._answers.pop(rank)
            del self._requests[rank]
            self._take(rank, self._hosts.resume(rank, answer))
            return True
        if self._launches:
            return self._step()
        return self._expire(None)

    def _take(self, rank: int, request: Any) -> None:
        """``rank`` has run and now wants ``request``."""
        if isinstance(request, Ended):
            self._ended[rank] = request
            if request.error is not None and not isinstance(request.error, Unwound):
                self._failure = rank, request.error
            return
        self._requests[rank] = request
        if isinstance(request, _Launch):
            try:
                self._launches[request.start()] = rank
            except (MemoryError, ConfigError) as error:
                self._answers[rank] = error

    def _step(self) -> bool:
        deadline = min(self._deadlines(), default=(0, 0))[0]
        event = self._runtime.emu_step(self._live(), SLICE_NS, deadline)
        if event == native.FINISHED:
            self._answers[self._launches.pop(self._runtime.emu_finished(self._live()))] = None
        elif event == native.FAILED:
            self._fail(failure_of(self._runtime, self._live()))
        elif event == native.DIED:
            self._bury()
        elif event == native.DEADLINE:
            return self._expire(self.time_ns)
        elif event == native.STALLED:
            return self._expire(None)
        return True

    def _fail(self, failure: EmulatorError) -> None:
        """Raise ``failure`` in the launch of the rank that it names."""
        ranks = {r: n for n, r in self._launches.items()}
        rank = failure.rank if failure.rank in ranks else next(iter(ranks))
        del self._launches[ranks[rank]]
        del self._requests[rank]
        self._take(rank, self._hosts.resume(rank, failure))
        if self._failure is None:  # the rank's function went on as if nothing had been
            self._failure = rank, failure

    def _bury(self) -> None:
        """End the thread of a rank that a fault has just stopped."""
        for number, rank in list(self._launches.items()):
            if self._runtime.emu_rank_dead(self._live(), rank):
                del self._launches[number]
                del self._requests[rank]
                request = self._hosts.resume(rank, Unwound())
                while not isinstance(request, Ended):  # cleanup code that would talk to others
                    request = self._hosts.resume(rank, Unwound())
                self._take(rank, Ended())

    def _deadlines(self) -> list[tuple[int, int]]:
        return [
            (request.deadline_ns, rank)
            for rank, request in self._requests.items()
            if isinstance(request, _Wait)
        ]

    def _expire(self, now_ns: int | None) -> bool:
        """Time out the wait that ends first. ``now_ns`` ``None``: let time pass until then."""
        waits = self._deadlines()
        if not waits:
            return False
        deadline, rank = min(waits)
        if now_ns is None:
            self._runtime.emu_move_time(self._live(), deadline)
        request = self._requests[rank]
        assert isinstance(request, _Wait)
        self._answers[rank] = TimeoutError(f"store key {request.key!r} was not set in time")
        return True

    def _results(self) -> list[Any]:
        if self._failure is not None:
            rank, error = self._failure
            how = "fair schedule" if self.seed == 0 else f"seed {self.seed}"
            error.add_note(f"rank {rank} of {self.num_ranks} in a simulation, {how}")
            raise error
        return [self._ended[rank].result for rank in range(self.num_ranks)]

    def _close(self) -> None:
        stubborn = self._hosts.unwind()
        if stubborn:
            logger.warning("threads of ranks %s of a simulation did not end", stubborn)
        world, self._world = self._world, None
        if world is not None:
            self._runtime.emu_destroy(world)

    def _live(self) -> int:
        if self._world is None:
            # A thread that outlived its simulation: nothing may touch the world any more.
            raise StateError("this simulation is over")
        return self._world
