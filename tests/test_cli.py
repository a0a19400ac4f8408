"""The command's shell: help, errors, exit codes, and how little it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SUBCOMMANDS = ("demo", "doctor", "compile", "fuzz", "bench")


def moecomm(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without colours, 100 columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "moecomm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **env},
        check=False,
    )


def test_help_lists_every_subcommand() -> None:
    shown = moecomm("--help")
    assert shown.returncode == 0
    for name in SUBCOMMANDS:
        assert f" {name} " in shown.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str) -> None:
    shown = moecomm(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"moecomm {name} [OPTIONS]" in shown.stdout


def test_help_imports_nothing_heavy() -> None:
    """`--help` must answer at once: no numpy, no subcommand."""
    script = (
        "import json, sys; sys.argv = ['moecomm', '--help']\n"
        "from moecomm.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(json.loads(shown.stderr))
    assert not loaded & {"numpy", "ml_dtypes", "numba", "torch", "cuda", "cupy"}
    assert not loaded & {f"moecomm.cli.{name}" for name in SUBCOMMANDS}


def test_version() -> None:
    shown = moecomm("--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("moecomm 0.")


def test_without_arguments_it_shows_help() -> None:
    shown = moecomm()
    assert "Usage: moecomm" in shown.stdout + shown.stderr


def test_an_error_is_one_line_and_exit_code_1() -> None:
    shown = moecomm("demo", "--ranks", "0")
    assert shown.returncode == 1
    assert "ConfigError: ranks=0: must be at least 1" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("arguments", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...]) -> None:
    shown = moecomm(*arguments, "--ranks", "0")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr
    assert "moecomm.errors.ConfigError: ranks=0" in shown.stderr


@pytest.mark.parametrize("arguments", [("nope",), ("demo", "--layout", "heap"), ("demo", "--nope")])
def test_usage_errors_are_exit_code_2(arguments: tuple[str, ...]) -> None:
    shown = moecomm(*arguments)
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr
