"""``moecomm demo`` from start to end: real ranks, the real kernels, real text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moecomm.cli.main import app
from moecomm.demo import session

SMALL = ("--tokens", "150", "--hidden", "200", "--inner", "64", "--step-tokens", "32")


def demo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moecomm", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **env},
        check=False,
    )


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--layout", "grouped", "--dtype", "float8_e4m3fn"),
        ("--layout", "rank", "--ranks", "3", "--experts", "7", "--top-k", "5"),
        ("--reduce", "sender", "--ranks", "2"),
        ("--ranks", "1"),
        ("--ranks", "5", "--tokens", "3"),
    ],
    ids=["default", "grouped-fp8", "rank-uneven", "sender", "one-rank", "ranks-without-tokens"],
)
def test_sharded_equals_unsharded(options: tuple[str, ...]) -> None:
    shown = demo(*SMALL, *options)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "PASSED" in shown.stdout
    assert "README" in shown.stdout


def test_any_text_and_what_it_costs(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Der Fluß floss; 漢字 and ελληνικά too. " * 20, encoding="utf-8")
    shown = demo(*SMALL, "--text", str(text))
    assert shown.returncode == 0, shown.stderr
    assert "story.txt: 150 tokens" in shown.stdout
    factor = re.search(r"would cost .* ([\d.]+) times as", shown.stdout.replace("\n", " "))
    assert factor is not None
    assert 1 < float(factor.group(1)) <= 8  # top-8: at most eight copies where one is enough


def test_it_prints_on_an_ascii_terminal() -> None:
    shown = demo(*SMALL, "--ranks", "2", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert "####" in shown.stdout
    assert "PASSED" in shown.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", "nowhere.txt"), "ConfigError: text='nowhere.txt': No such file"),
        (("--top-k", "40"), "ConfigError: top_k=40"),
        (("--layout", "rank", "--reduce", "sender"), "ConfigError: reduce='sender'"),
    ],
    ids=["no-text", "top-k", "rank-sender"],
)
def test_bad_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    shown = demo(*options)
    assert shown.returncode == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_wrong_layer_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.run_plain

    def wrong(problem: session.Problem) -> session.PlainResult:
        plain = real(problem)
        return replace(plain, out=plain.out + 1)

    monkeypatch.setattr(session, "run_plain", wrong)
    shown = CliRunner().invoke(app, ["demo", *SMALL, "--ranks", "1"])
    assert shown.exit_code == 1
    assert "FAILED" in shown.output
    assert "times what rounding" in shown.output
