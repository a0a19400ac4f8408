"""``EmulatorProgram``: kernels of one source text, compiled for the CPU and found by name."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from moecomm import cpus
from moecomm.emulator.build import build_program
from moecomm.emulator.native import KernelEntry
from moecomm.errors import ConfigError

_KERNEL: Final = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\('
)
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE: Final = re.compile(r"^[ \t]*#(?:[^\\\n]|\\.)*", re.DOTALL | re.MULTILINE)


class EmulatorProgram:
    """Kernels that the emulator can launch.

    Args:
        source: complete CUDA C++ text, includes of the project's own files inlined. Kernels are
            the functions ``extern "C" __global__ void name(Args)``, with one argument that can be
            copied as bytes, or none. The text may use everything in ``emulator.hpp``, also in
            macros ahead of its ``#include`` of it.
        name: for messages, and the file name of a source that does not compile.
        kernels: names of its kernels; ``None``: those that the text defines outside of macros.
        objects: makes the object files that are linked with it, when a variant is asked for.

    Nothing is compiled before a variant is asked for: ``prepare``, or the first launch.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "program",
        kernels: Sequence[str] | None = None,
        objects: Callable[[], Sequence[Path]] = tuple,
    ) -> None:
        self.source = source
        self.name = name
        found = _KERNEL.findall(_strip(source)) if kernels is None else kernels
        self.kernels: tuple[str, ...] = tuple(dict.fromkeys(found))
        if not self.kernels:
            raise ConfigError(f'{name}: source has no extern "C" __global__ void name(Args)')
        self._objects = objects
        self._variants: dict[bool, _Variant] = {}
        self._lock = threading.Lock()

    def prepare(self, *, checks: bool = False) -> None:
        """Compile and load now. Raises ``CompileError``."""
        self._variant(checks)

    def is_ready(self, checks: bool) -> bool:
        """Whether ``prepare`` has nothing to do."""
        return checks in self._variants

    def entry(self, kernel: str, num_bytes: int, *, checks: bool) -> int:
        """Return the address of the kernel's table row; ``num_bytes`` are its arguments.

        Raises:
            ConfigError: there is no such kernel, or its arguments have another size.
            CompileError: the program does not compile.
        """
        variant = self._variant(checks)
        if kernel not in variant.entries:
            raise ConfigError(
                f"kernel={kernel!r}: {self.name} has {', '.join(sorted(variant.entries))}"
            )
        address, expected = variant.entries[kernel]
        if num_bytes != expected:
            raise ConfigError(
                f"args: {num_bytes} bytes, but {kernel} in {self.name} takes {expected}"
            )
        return address

    def _variant(self, checks: bool) -> _Variant:
        with self._lock:
            if checks not in self._variants:
                text = _complete(self.source, self.kernels)
                objects = self._objects()
                path = build_program(text, self.name, checks=checks, objects=objects)
                self._variants[checks] = _Variant(ctypes.CDLL(str(path)))
            return self._variants[checks]


def prepare_all(programs: Iterable[EmulatorProgram], *, checks: bool) -> None:
    """``prepare`` many, as many at once as there are processors: each is a compiler's process.

    Raises:
        CompileError: the first one that does not compile.
    """
    todo = [program for program in dict.fromkeys(programs) if not program.is_ready(checks)]
    if not todo:
        return
    with ThreadPoolExecutor(len(cpus.allowed())) as pool:
        for _ in pool.map(lambda program: program.prepare(checks=checks), todo):
            pass


class _Variant:
    """A loaded shared object and its kernels: name → (address of the row, bytes of arguments)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library  # unloading it would pull the code away from under a launch
        count = ctypes.c_uint64()
        table = library.moecomm_emu_kernels
        table.restype = ctypes.POINTER(KernelEntry)
        table.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
        rows = table(ctypes.byref(count))
        self.entries: dict[str, tuple[int, int]] = {}
        for i in range(count.value):
            row = rows[i]
            self.entries[row.name.decode()] = (ctypes.addressof(row), row.args_bytes)


def _strip(source: str) -> str:
    return _DIRECTIVE.sub(" ", _COMMENT.sub(" ", source))


def _complete(source: str, kernels: Sequence[str]) -> str:
    """Put the headers before ``source`` and its kernel table behind it."""
    lines = ['#include "emulator.hpp"', source, '#line 1 "kernel table"']
    for kernel in kernels:
        lines.append(f"static void run_{kernel}(const void* args) {{ emu::call({kernel}, args); }}")
    lines.append("static const emu::Kernel kernel_table[] = {")
    for kernel in kernels:
        lines.append(f'    {{"{kernel}", run_{kernel}, emu::args_bytes({kernel})}},')
    lines += [
        "};",
        'extern "C" __attribute__((visibility("default"), no_sanitize("thread")))',
        "const emu::Kernel* moecomm_emu_kernels(u64* count)",
        "{",
        "    emu::loaded() = true;",
        f"    *count = {len(kernels)};",
        "    return kernel_table;",
        "}",
    ]
    return "\n".join(lines) + "\n"
