"""The runtime's C interface (``include/runtime.cpp``) through ctypes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from moecomm.emulator.build import build_runtime
from moecomm.errors import ConfigError

Dim3 = tuple[int, int, int]

MAX_SHARED_BYTES: Final = 227 * 1024  # of one block on sm_90
MAX_BLOCK_THREADS: Final = 1024
MAX_LAUNCH_THREADS: Final = 1 << 18  # all blocks of a launch are resident

NO_RANK: Final = 0xFFFFFFFF
TOO_MANY_THREADS: Final = 2**64 - 1  # instead of a launch's number
MAX_CHECKED_THREADS: Final = 8192  # clocks.hpp: of all ranks' largest launches together

# Event (world.hpp)
BUDGET, FINISHED, FAILED, DIED, DEADLINE, STALLED = range(6)

_U32, _U64, _POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "emu_create": (_POINTER, [_POINTER]),
    "emu_destroy": (None, [_POINTER]),
    "emu_launch": (
        _U64,
        [_POINTER, _U32, _POINTER, _POINTER, _POINTER, _U64, _POINTER, _POINTER, _U64],
    ),
    "emu_step": (_U32, [_POINTER, _U64, _U64]),
    "emu_finished": (_U64, [_POINTER]),
    "emu_abandon": (None, [_POINTER]),
    "emu_time_ns": (_U64, [_POINTER]),
    "emu_steps": (_U64, [_POINTER]),
    "emu_move_time": (None, [_POINTER, _U64]),
    "emu_register": (_U32, [_POINTER, _U32, _U64, _U64, _U32, ctypes.c_char_p]),
    "emu_mark_written": (_U32, [_POINTER, _U32, _U64, _U64]),
    "emu_host_release": (None, [_POINTER, _U32, _U64]),
    "emu_host_acquire": (None, [_POINTER, _U32, _U64]),
    "emu_host_forget": (None, [_POINTER, _U64]),
    "emu_rank_dead": (_U32, [_POINTER, _U32]),
    "emu_failure_kind": (_U32, [_POINTER]),
    "emu_failure_rank": (_U32, [_POINTER]),
    "emu_failure_text": (ctypes.c_char_p, [_POINTER]),
}


class Options(ctypes.Structure):
    """``emu::Options``."""

    _fields_ = [
        ("num_ranks", _U32),
        ("simulation", _U32),
        ("seed", _U64),
        ("max_steps", _U64),
        ("checks", _U32),
        ("unused", _U32),
        ("dead_rank", _U32),
        ("delay_stores", _U32),
        ("dead_after_steps", _U64),
        ("drop_nth_release", _U64),
        ("duplicate_release", _U64),
    ]


class KernelEntry(ctypes.Structure):
    """``emu::Kernel``: one row of a program's table."""

    _fields_ = [("name", ctypes.c_char_p), ("run", _POINTER), ("args_bytes", _U64)]


@functools.cache
def runtime() -> ctypes.CDLL:
    """Return the runtime library, built on first use. Its calls release the GIL."""
    library = ctypes.CDLL(str(build_runtime()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def dim3(name: str, value: int | tuple[int, ...]) -> Dim3:
    """Return ``value`` as (x, y, z), all at least 1. Raises ``ConfigError`` otherwise."""
    parts = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(p < 1 for p in parts):
        raise ConfigError(f"{name}={value!r}: must be 1 to 3 integers of at least 1")
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


def check_launch(grid: Dim3, block: Dim3, shared_bytes: int) -> None:
    """Refuse a launch that no GPU, or not the emulator, could make: ``ConfigError``."""
    threads = block[0] * block[1] * block[2]
    if threads > MAX_BLOCK_THREADS:
        raise ConfigError(f"block={block}: {threads} threads, at most {MAX_BLOCK_THREADS}")
    total = threads * grid[0] * grid[1] * grid[2]
    if total > MAX_LAUNCH_THREADS:
        raise ConfigError(
            f"grid={grid}: {total} threads, the emulator runs at most {MAX_LAUNCH_THREADS} at once"
        )
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise ConfigError(f"shared_bytes={shared_bytes}: must be 0 to {MAX_SHARED_BYTES}")
