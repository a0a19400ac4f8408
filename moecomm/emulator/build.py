"""Device sources → shared objects for this CPU, compiled once and cached.

Kernels see the ``device_*.hpp`` headers only and compile in about a second; the runtime
(``runtime.cpp`` with the other headers) is one shared object for all of them.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from moecomm import env
from moecomm.cache import default_cache, key_of
from moecomm.errors import CompileError

logger = logging.getLogger(__name__)

# Products and sums stay separately rounded (contract=off), and memory is looked at as several
# types (no-strict-aliasing), both as in device code. No -march: the cache may be shared.
FLAGS: Final = (
    "-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fno-math-errno",
)  # fmt: skip
PROGRAM_FLAGS: Final = (*FLAGS, "-fno-exceptions", "-fno-rtti")
PLAIN_FLAGS: Final = ("-DMOECOMM_EMULATOR_CHECKS=0",)
# The compiler reports every memory access to functions of device_hooks.hpp. Only the compiling
# step is told: the linking step would add a sanitizer library. -g1: lines, for reports. -O1: these
# functions are most of a run, which is as fast as with -O2, and compiling takes a quarter less.
CHECKED_FLAGS: Final = ("-DMOECOMM_EMULATOR_CHECKS=1", "-fsanitize=thread", "-g1", "-O1")
# An emulated thread has 64 KiB of stack, or more. The compilers spell this differently; and clang
# instruments atomic operations even where it is told not to instrument.
GCC_FLAGS: Final = ("-Werror=frame-larger-than=49152",)
CLANG_FLAGS: Final = ("-Wframe-larger-than=49152", "-Werror=frame-larger-than")
CHECKED_CLANG_FLAGS: Final = ("-mllvm", "-tsan-instrument-atomics=0")
# A program uses its own definitions (memcpy, with checks), whatever the process has loaded before.
LINK_FLAGS: Final = ("-shared", *(("-Wl,-Bsymbolic",) if platform.system() == "Linux" else ()))
COMPILERS: Final = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S: Final = 300.0
DEVICE_HEADERS: Final = (
    "abi.hpp", "device_atomics.hpp", "device_hooks.hpp", "device_math.hpp", "device_memory.hpp",
    "device_sync.hpp", "device_types.hpp", "emulator.hpp",
)  # fmt: skip


def include_dir() -> Path:
    """Return the folder of the emulator's headers."""
    return Path(str(resources.files("moecomm.emulator"))) / "include"


def find_compiler() -> tuple[str, ...]:
    """Return the C++ compiler as a command: ``MOECOMM_CXX``, ``$CXX``, or the first one found.

    Raises:
        CompileError: there is none; the message says how to get one.
    """
    for named in (env.get("CXX"), os.environ.get("CXX")):
        command = shlex.split(named or "")
        if command:
            if shutil.which(command[0]) is None:
                raise CompileError(f"the C++ compiler {command[0]!r} (MOECOMM_CXX, CXX) is missing")
            return tuple(command)
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return (found,)
    raise CompileError(
        f"no C++ compiler found (tried {', '.join(COMPILERS)}): the CPU emulator compiles the "
        f"kernels on first use. Install one: {_install_hint()}; or set MOECOMM_CXX to its path"
    )


def build_program(source: str, name: str, *, checks: bool, objects: Sequence[Path] = ()) -> Path:
    """Return the shared object of kernels ``source``, which defines the kernel table.

    ``name`` is for messages and for the name of a kept source. ``objects`` are object files that
    ``source`` calls and that call it; with them, ``source`` is compiled once whatever they are.

    Raises:
        CompileError: no compiler, or it refuses; holds its log and the path of the kept source.
    """
    clang = "clang" in _compiler_version(find_compiler())
    flags = [*PROGRAM_FLAGS, *(CHECKED_FLAGS if checks else PLAIN_FLAGS)]
    flags += CLANG_FLAGS if clang else GCC_FLAGS
    if clang and checks:
        flags += CHECKED_CLANG_FLAGS
    if not objects:
        return _build(source, name, flags, DEVICE_HEADERS)
    return _link(name, [_build(source, name, flags, DEVICE_HEADERS, suffix=".o"), *objects])


def build_object(source: str, name: str) -> Path:
    """Return the object file of plain C++ that needs none of the emulator's headers. Raises as
    ``build_program``."""
    return _build(source, name, PROGRAM_FLAGS, (), suffix=".o")


def build_runtime() -> Path:
    """Return the shared object of the emulator's runtime. Raises as ``build_program``."""
    headers = sorted(f.name for f in include_dir().glob("*.hpp"))
    source = (include_dir() / "runtime.cpp").read_text(encoding="utf-8")
    return _build(source, "emulator_runtime", FLAGS, headers)


def _build(
    source: str, name: str, flags: Sequence[str], headers: Sequence[str], suffix: str = ".so"
) -> Path:
    compiler = find_compiler()
    texts = [(include_dir() / header).read_text(encoding="utf-8") for header in headers]
    machine = f"{platform.system()} {platform.machine()}"
    key = key_of(source, *texts, *flags, *compiler[1:], _compiler_version(compiler), machine)

    def compile_to(path: Path) -> None:
        _compile(compiler, source, name, flags, path)

    return default_cache().get(key, suffix, compile_to, what=f"emulator program {name}")


def _link(name: str, objects: Sequence[Path]) -> Path:
    compiler = find_compiler()
    version = _compiler_version(compiler)
    key = key_of("link", *LINK_FLAGS, version, *(file.read_bytes() for file in objects))

    def link_to(path: Path) -> None:
        files = [str(file) for file in objects]
        _run(name, "", [*compiler, *LINK_FLAGS, "-o", str(path), *files, "-lm"])

    return default_cache().get(key, ".so", link_to, what=f"emulator program {name}")


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    try:
        ran = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        command = shlex.join(compiler)
        raise CompileError(f"the C++ compiler {command} does not run: {error}") from error
    return ran.stdout


def _compile(
    compiler: tuple[str, ...], source: str, name: str, flags: Sequence[str], output: Path
) -> None:
    source_path = output.parent / f"{name}.cpp"
    source_path.write_text(source, encoding="utf-8")
    linked = output.suffix != ".o"
    obj = str(source_path.with_suffix(".o") if linked else output)
    _run(
        name,
        source,
        [*compiler, *flags, "-I", str(include_dir()), "-c", "-o", obj, str(source_path)],
    )
    if linked:
        _run(name, source, [*compiler, *LINK_FLAGS, "-o", str(output), obj, "-lm"])


def _run(name: str, source: str, command: list[str]) -> None:
    logger.debug("building %s: %s", name, shlex.join(command))
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(name, f"took over {COMPILE_TIMEOUT_S:.0f} s", "", source) from error
    if ran.returncode != 0:
        raise _failed(name, f"exit status {ran.returncode}", ran.stderr, source)


def _failed(name: str, why: str, log: str, source: str) -> CompileError:
    kept = default_cache().keep(key_of(source), f"{name}.cpp", source)
    first = next((line for line in log.splitlines() if "error:" in line), "")
    return CompileError(
        f"compiling {name} for the CPU failed ({why}): {first}\n"
        f"source {'was not kept' if kept is None else f'kept in {kept}'}",
        log=log,
        source_path=None if kept is None else str(kept),
    )


def _install_hint() -> str:
    if platform.system() == "Darwin":
        return "`xcode-select --install` or `brew install gcc`"
    return "`apt install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora, RHEL)"
