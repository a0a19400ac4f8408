"""``scripts/gpu-check`` and what it puts under compute-sanitizer, without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import sanitize_case
from exchange import make_case
from threads import run_threads

ROOT = Path(__file__).parent.parent
FILES = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_gpu_*.py"))


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def gpu_check(tmp_path: Path, python: str, **variables: str) -> tuple[int, list[str]]:
    """Its exit code and summary, where ``python`` is what a shell makes of every command."""
    program(tmp_path / "python", python)
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu-check"), str(tmp_path / "logs")],
        env={**os.environ, "PYTHON": str(tmp_path / "python"), "CUDA_HOME": "/none", **variables},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    return done.returncode, lines[lines.index(f"== summary (logs in {tmp_path / 'logs'})") + 1 :]


def test_every_file_of_gpu_tests_has_its_line(tmp_path: Path) -> None:
    code, lines = gpu_check(tmp_path, "echo; echo 3 passed; echo")
    assert code == 0
    assert [line.split()[0] for line in lines] == [*FILES, "compute-sanitizer"]
    assert all("passed" in line and line.endswith("3 passed") for line in lines[:-1])
    assert "not installed" in lines[-1]


def test_failures_and_time_outs_do_not_stop_the_others(tmp_path: Path) -> None:
    python = 'case "$*" in *direct*) exit 3;; *nvlink*) sleep 20;; esac; echo fine'
    code, lines = gpu_check(tmp_path, python, GROUP_S="1")
    assert code == 1
    how = {line.split()[0]: line for line in lines}
    assert "FAILED (3)" in how["gpu_direct"]
    assert "OUT OF TIME" in how["gpu_nvlink"]
    assert "passed" in how["gpu_cupy"]


def test_the_sanitizer_runs_the_cases(tmp_path: Path) -> None:
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    program(
        tmp_path / "cuda" / "bin" / "compute-sanitizer",
        'case "$*" in *racecheck*) exit 99;; esac; echo "$@"',
    )
    code, lines = gpu_check(tmp_path, "echo fine", CUDA_HOME=str(tmp_path / "cuda"))
    assert code == 1
    memcheck, racecheck = lines[-2:]
    assert memcheck.endswith("tests/sanitize_case.py")
    assert "FAILED (99)" in racecheck


@pytest.mark.parametrize(
    "name", ["batched-lines", "rank-cast-lines", "capped-cast-flags", "grouped-bounce"]
)
def test_the_cases_are_right(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cfg, ranks, input_dtype = sanitize_case.CASES[name]
    cases = [make_case(cfg, ranks, step, input_dtype=input_dtype) for step in range(2)]
    transport, variables = sanitize_case.network(name)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    run_threads(sanitize_case.exchange, ranks, cases, "cpu", transport)
