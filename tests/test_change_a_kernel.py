"""``docs/change-a-kernel.md``, done word for word: its files written, its commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.kernels.numba_jit.lowered import lower
from moecomm.kernels.numba_jit.sources import read
from moecomm.kernels.stages import STAGES

GUIDE = Path(__file__).parents[1] / "docs" / "change-a-kernel.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(GUIDE.read_text("utf-8")) if name == language]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The guide's files: each says its name in its first line."""
    for text in blocks("python"):
        name = text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("block", blocks("console"))
def test_a_command_shows_what_the_guide_says(block: str, files: Path) -> None:
    command, *shown = block.splitlines()
    arguments = shlex.split(command.removeprefix("$ moecomm "))
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "moecomm", *arguments],
        cwd=files, env={**os.environ, "PYTHONPATH": root, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    for line in shown:
        assert line in said, said
    assert (done.returncode == 1) == ("failed on" in block), said


def test_what_is_to_be_forgotten_is_all_that_differs(files: Path) -> None:
    """The guide's mistake is the package's function without its last barrier."""
    plain = {part.name: part for part in lower(read(), *STAGES)}
    wrong = {part.name: part for part in lower(read(files / "forgetful.py"), *STAGES)}
    calls = [set(found["receive_record"].calls) for found in (plain, wrong)]
    assert calls[0] - calls[1] == {"sync_block"}
    assert {name for name in plain if plain[name].text != wrong[name].text} == {"receive_record"}


def test_the_reference_of_the_guide_is_complete() -> None:
    text = GUIDE.read_text("utf-8")
    for name in re.findall(r"`(\w+\.(?:py|cuh))`", text):
        if name not in ("my_recv.py",):
            found = list((Path(__file__).parents[1] / "moecomm" / "kernels" / "numba").glob(name))
            assert found, name
