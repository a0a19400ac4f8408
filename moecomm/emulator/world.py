"""``World``: the runtime's object of that name, with its failures as exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from moecomm.emulator import native
from moecomm.emulator.errors import EmulatorError
from moecomm.emulator.failures import failure_of
from moecomm.emulator.native import Dim3
from moecomm.errors import ConfigError, StateError


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that can be made: checked, its kernel found.

    ``entry`` is the address of the kernel's table row, ``config`` the words that device code
    reads as ``emu::config()``.
    """

    entry: int
    args: bytes
    config: Sequence[int]
    grid: Dim3
    block: Dim3
    shared_bytes: int


def checked_launch(
    entry: int,
    args: bytes,
    config: Sequence[int],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    shared_bytes: int,
) -> Launch:
    """Return the launch, or raise ``ConfigError`` if no GPU, or not the emulator, could make it."""
    grid, block = native.dim3("grid", grid), native.dim3("block", block)
    native.check_launch(grid, block, shared_bytes)
    return Launch(entry, args, config, grid, block, shared_bytes)


class World:
    """Launches of one rank, or of all ranks of a simulation, and the threads that run them.

    Not thread-safe. ``close`` is idempotent; every other call after it raises ``StateError``.
    """

    def __init__(self, options: native.Options) -> None:
        self._runtime = native.runtime()
        self._address: int | None = self._runtime.emu_create(ctypes.byref(options))
        if not self._address:
            raise MemoryError("no memory for an emulator world")

    def launch(self, rank: int, launch: Launch) -> int:
        """Begin ``launch``; return its number. ``step`` runs it."""
        words = (ctypes.c_uint64 * max(1, len(launch.config)))(*launch.config)
        number: int = self._runtime.emu_launch(
            self._live(), rank, launch.entry, launch.args, words, len(launch.config),
            (ctypes.c_uint32 * 3)(*launch.grid), (ctypes.c_uint32 * 3)(*launch.block),
            launch.shared_bytes,
        )  # fmt: skip
        shape = f"grid={launch.grid}, block={launch.block}"
        if number == native.TOO_MANY_THREADS:
            raise ConfigError(
                f"{shape}: with checks, the largest launches of all ranks may have "
                f"{native.MAX_CHECKED_THREADS} threads together"
            )
        if not number:
            raise MemoryError(f"{shape}: no memory for this launch")
        return number

    def step(self, wall_ns: int, deadline_ns: int = 0) -> int:
        """Run until something happens; return an event of ``native``.

        At most about ``wall_ns`` of real time, and not past ``deadline_ns`` of a simulation's
        (0: no limit).
        """
        return int(self._runtime.emu_step(self._live(), wall_ns, deadline_ns))

    def take_finished(self) -> int:
        """After ``FINISHED``: the number of the launch."""
        return int(self._runtime.emu_finished(self._live()))

    def failure(self) -> EmulatorError:
        """After ``FAILED``: what was found."""
        return failure_of(self._runtime, self._live())

    def abandon(self) -> None:
        """Drop all launches where they stand, and any failure."""
        self._runtime.emu_abandon(self._live())

    @property
    def time_ns(self) -> int:
        return int(self._runtime.emu_time_ns(self._live()))

    def move_time(self, to_ns: int) -> None:
        self._runtime.emu_move_time(self._live(), to_ns)

    def is_dead(self, rank: int) -> bool:
        return bool(self._runtime.emu_rank_dead(self._live(), rank))

    # ---- what the checks are told ----------------------------------------------------------------

    def register(self, rank: int, address: int, nbytes: int, kind: int, name: str) -> None:
        if not self._runtime.emu_register(self._live(), rank, address, nbytes, kind, name.encode()):
            raise MemoryError(f"no memory to register {name}")

    def mark_written(self, rank: int, address: int, nbytes: int) -> None:
        if not self._runtime.emu_mark_written(self._live(), rank, address, nbytes):
            raise MemoryError(f"no memory to mark {nbytes} bytes as written")

    def host_release(self, rank: int, token: int) -> None:
        """Keep what the host of ``rank`` knows under ``token``."""
        self._runtime.emu_host_release(self._live(), rank, token)

    def host_acquire(self, rank: int, token: int) -> None:
        """The host of ``rank`` learns what is kept under ``token``."""
        self._runtime.emu_host_acquire(self._live(), rank, token)

    def host_forget(self, token: int) -> None:
        self._runtime.emu_host_forget(self._live(), token)

    def close(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            self._runtime.emu_destroy(address)

    def _live(self) -> int:
        if self._address is None:
            raise StateError("this emulator world is closed")
        return self._address
