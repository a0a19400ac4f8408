"""``ProcessWorld``: this process is one rank; the other ranks are other processes.

Launches are synchronous. Threads that wait poll real memory; when none can go on, the process
gives up its processor, then sleeps 20 to 50 µs at a time. Time is the machine's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from moecomm.emulator import native
from moecomm.emulator.program import EmulatorProgram
from moecomm.emulator.world import World, checked_launch

SLICE_NS: Final = 50_000_000  # a launch returns to Python this often, so that Ctrl-C works


class ProcessWorld:
    """Runs kernels of ``program`` with the configuration words ``config``.

    Kernels read the words as ``emu::config()[i]``. One launch at a time (a second thread waits);
    worlds of one process run side by side. Idempotent ``close``; also a context manager.
    """

    def __init__(self, program: EmulatorProgram, config: Sequence[int] = ()) -> None:
        self.program = program
        self._config = tuple(config)
        self._lock = threading.Lock()
        self._world = World(native.Options(num_ranks=1, dead_rank=native.NO_RANK))

    def launch(
        self,
        kernel: str,
        args: bytes,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` to its end. ``args`` are the bytes of its argument struct.

        Raises:
            ConfigError: unknown kernel, wrong size of ``args``, impossible launch shape.
            CompileError: the program does not compile.
            Deadlock: all threads that are left wait for each other.
            CheckFailure: threads diverge where CUDA forbids it, or a stack overflowed.
            StateError: closed.
        """
        entry = self.program.entry(kernel, len(args), checks=False)
        launch = checked_launch(entry, args, self._config, grid, block, shared_bytes)
        with self._lock:
            number = self._world.launch(0, launch)
            try:
                self._finish(number)
            except BaseException:  # Ctrl-C too: the launch will not go on
                self._world.abandon()
                raise

    def close(self) -> None:
        with self._lock:
            self._world.close()

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody else has this object any more, so no launch is under way.
        world = getattr(self, "_world", None)
        if world is not None:
            world.close()

    def _finish(self, number: int) -> None:
        while True:
            event = self._world.step(SLICE_NS)
            if event == native.FINISHED:
                assert self._world.take_finished() == number
                return
            if event == native.FAILED:
                raise self._world.failure()
