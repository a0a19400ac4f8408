"""The context switch of every machine: this one's, the fallback without assembly, and aarch64.

aarch64 runs in qemu's user emulation where that and a cross compiler are installed
(``apt install g++-aarch64-linux-gnu qemu-user``).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from emulator_programs import KERNELS

from moecomm.emulator.build import find_compiler, include_dir


def run_driver(tmp_path: Path, compiler: list[str], runner: list[str]) -> None:
    driver = str(tmp_path / "driver")
    command = [
        *compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off",
        "-fno-strict-aliasing", "-I", str(include_dir()), str(KERNELS / "driver.cpp"),
        "-o", driver, "-lm", "-ldl",
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([*runner, driver], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout.endswith("passed\n"), (ran.returncode, ran.stdout[-2000:], ran.stderr)


def test_this_machine(tmp_path: Path) -> None:
    run_driver(tmp_path, [*find_compiler()], [])


def test_without_assembly(tmp_path: Path) -> None:
    run_driver(tmp_path, [*find_compiler(), "-DMOECOMM_EMULATOR_UCONTEXT"], [])


def test_aarch64(tmp_path: Path) -> None:
    compiler, runner = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or runner is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    run_driver(tmp_path, [compiler, "-static"], [runner])
