"""``ProcessWorld``: this process is one rank; the other ranks are other processes.

Launches are synchronous. Threads that wait poll real memory; when none can go on, the process
gives up its processor, then sleeps 20 to 50 µs at a time. Time is the machine's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Final

from moecomm.emulator import native
from moecomm.emulator.failures import failure_of
from moecomm.emulator.program import EmulatorProgram
from moecomm.errors import StateError

SLICE_NS: Final = 50_000_000  # a launch returns to Python this often, so that Ctrl-C works


class ProcessWorld:
    """Runs kernels of ``program`` with the configuration words ``config``.

    Kernels read the words as ``emu::config()[i]``. One launch at a time; use one world per stream
    of launches. Idempotent ``close``; also a context manager.
    """

    def __init__(self, program: EmulatorProgram, config: Sequence[int] = ()) -> None:
        self.program = program
        self._config = (ctypes.c_uint64 * max(1, len(config)))(*config)
        self._config_words = len(config)
        self._runtime = native.runtime()
        self._lock = threading.Lock()
        options = native.Options(num_ranks=1, dead_rank=native.NO_RANK)
        self._world: int | None = self._runtime.emu_create(ctypes.byref(options))
        if not self._world:
            raise MemoryError("no memory for an emulator world")

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
        grid, block = native.dim3("grid", grid), native.dim3("block", block)
        native.check_launch(grid, block, shared_bytes)
        entry = self.program.entry(kernel, len(args), checks=False)
        with self._lock:
            if self._world is None:
                raise StateError("this ProcessWorld is closed")
            number = self._runtime.emu_launch(
                self._world, 0, entry, args, self._config, self._config_words,
                (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), shared_bytes,
            )  # fmt: skip
            if not number:
                raise MemoryError(f"no memory for a launch of {grid} blocks of {block} threads")
            self._finish()

    def close(self) -> None:
        with self._lock:
            if self._world is not None:
                self._runtime.emu_destroy(self._world)
                self._world = None

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not the lock: a finaliser may run inside a launch of this thread.
        world, self._world = getattr(self, "_world", None), None
        if world is not None:
            self._runtime.emu_destroy(world)

    def _finish(self) -> None:
        try:
            while True:
                event = self._runtime.emu_step(self._world, SLICE_NS, 0)
                if event == native.FINISHED:
                    self._runtime.emu_finished(self._world)
                    return
                if event == native.FAILED:
                    raise failure_of(self._runtime, self._world)
        except BaseException:  # Ctrl-C too: the launch will not go on
            self._runtime.emu_abandon(self._world)
            raise
