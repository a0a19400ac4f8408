"""The C++ compiler of the CPU emulator: does what it builds really load and run?"""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm.cache import default_root
from moecomm.doctor.finding import Finding, bad, ok
from moecomm.emulator import build
from moecomm.errors import CompileError

TOPIC: Final = "CPU emulator"
TIMEOUT_S: Final = 120.0
_ANSWER: Final = 42
# Headers and library calls that the emulator needs, and a result that proves it ran.
_PROGRAM: Final = """
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
extern "C" __attribute__((visibility("default"))) int answer(int six)
{
    std::atomic<std::uint64_t> product{0};
    auto seven = std::make_unique<double>(std::sqrt(49.0));
    product.fetch_add(static_cast<std::uint64_t>(*seven) * six, std::memory_order_acq_rel);
    return static_cast<int>(product.load());
}
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The command and the first line of its ``--version``; or why it does not work."""

    command: str = ""
    version: str = ""
    error: str | None = None


def probe(find: Callable[[], tuple[str, ...]] = build.find_compiler) -> Compiler:
    """Compile a tiny program with the emulator's flags, load it and call it."""
    try:
        command = find()
    except CompileError as error:
        return Compiler(error=str(error))
    text = shlex.join(command)
    try:
        return Compiler(text, _version(command), _try(command, _workplace()))
    except (OSError, subprocess.SubprocessError) as error:
        return Compiler(text, error=str(error))


def _workplace() -> Path | None:
    """Where the cache lies, because a mount that forbids execution must show here."""
    root = default_root()
    return root if root is not None and root.is_dir() else None


def _version(command: Sequence[str]) -> str:
    done = _run([*command, "--version"])
    return (done.stdout.splitlines() or [""])[0]


def _try(command: Sequence[str], workplace: Path | None) -> str | None:
    """Build, load and call the program; why that fails, or ``None``."""
    try:
        folder = tempfile.TemporaryDirectory(dir=workplace)
    except OSError:  # a read-only cache; `storage` reports that
        folder = tempfile.TemporaryDirectory()
    with folder as name:
        source, library = Path(name) / "tiny.cpp", Path(name) / "tiny.so"
        source.write_text(_PROGRAM, encoding="utf-8")
        flags = (*build.FLAGS, *build.LINK_FLAGS)
        done = _run([*command, *flags, "-o", str(library), str(source), "-lm"])
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return f"does not compile: {(lines or [f'exit code {done.returncode}'])[0]}"
        try:
            result = ctypes.CDLL(str(library)).answer(6)
        except OSError as error:  # a mount with noexec, or a compiler for another machine
            return f"what it builds does not load: {error}"
    return None if result == _ANSWER else f"what it builds computes {result}, not {_ANSWER}"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def findings(compiler: Compiler) -> list[Finding]:
    if compiler.error is None:
        detail = f"{compiler.command}: {compiler.version}; built, loaded and ran a program"
        return [ok(TOPIC, "C++ compiler", detail, required=True)]
    detail = f"{compiler.command}: {compiler.error}" if compiler.command else compiler.error
    fix = "apt-get install g++ (or dnf install gcc-c++), or set MOECOMM_CXX"
    return [bad(TOPIC, "C++ compiler", detail, fix, required=True)]
