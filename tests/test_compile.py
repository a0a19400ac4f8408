"""``moecomm compile``: the table, exit codes, several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from moecomm.cli import compile as command
from moecomm.errors import CompileError, ConfigError
from moecomm.kernels.jit import Compiled, Resources
from moecomm.kernels.jit.batch import Outcome, Task, compile_all
from moecomm.kernels.stages import variants

FINE = Resources(40, 0, 0, 0, 16, 752)
SPILLED = replace(FINE, spill_store_bytes=8, spill_load_bytes=4, stack_bytes=8)


def outcome(resources: Resources | None, label: str = "fp8 rank") -> Outcome:
    task = Task(label, "from float16", "dispatch_send.cu", {}, "sm_90")
    if resources is None:
        return Outcome(task, None, CompileError("dispatch_send.cu does not compile: [x]"))
    path = Path("/cache/a.cubin")
    names = ("dispatch_send",)
    report = {"dispatch_send": resources}
    return Outcome(task, Compiled(task.source, "sm_90", path, names, report, 36864, 0.31, False))


def shown(outcomes: list[Outcome], width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        command.show(outcomes, console)
    return capture.get()


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moecomm", "compile", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "MOECOMM_CACHE_DIR": str(cache), "COLUMNS": "80"},
    )


def test_table() -> None:
    text = shown([outcome(FINE), outcome(FINE, "bf16 sender")])
    for part in ("sm_90, fp8 rank", "sm_90, bf16 sender", "dispatch_send, from float16"):
        assert part in text
    [line, _] = [line.split() for line in text.splitlines() if "dispatch_send" in line]
    assert line[-6:] == ["40", "0", "0", "16", "36", "0.31"]
    assert "2 cubins, 72 KiB, 0 from the cache; 0 kernels spill registers, 0 do not" in text


def test_spills_fail() -> None:
    outcomes = [outcome(FINE), outcome(SPILLED)]
    assert command.failed(outcomes)
    assert not command.failed(outcomes[:1])
    text = shown(outcomes)
    assert " 12 " in text
    assert "1 kernels spill" in text


def test_errors_fail_and_are_shown() -> None:
    outcomes = [outcome(FINE), outcome(None)]
    assert command.failed(outcomes)
    text = shown(outcomes)
    assert "dispatch_send.cu does not compile: [x]" in text
    assert "1 do not compile" in text
    assert command.rows(outcomes[1])[0]["error"] == "dispatch_send.cu does not compile: [x]"


@pytest.mark.parametrize("jobs", [1, 2])
def test_outcomes_of_all_tasks(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    good = next(variant for variant in variants() if variant.stage == "combine_send")
    bad = {**good.defines, "NUM_RANKS": "nothing"}
    tasks = [
        Task("good", "", good.source, good.defines, "sm_90"),
        Task("bad", "", good.source, bad, "sm_90"),
        Task("good", "", good.source, good.defines, "sm_80"),
    ]
    outcomes = {(o.task.label, o.task.arch): o for o in compile_all(tasks, jobs)}
    assert len(outcomes) == 3
    assert outcomes["bad", "sm_90"].compiled is None
    assert "nothing" in str(outcomes["bad", "sm_90"].error)
    for arch in ("sm_80", "sm_90"):
        compiled = outcomes["good", arch].compiled
        assert compiled is not None
        assert compiled.arch == arch
        assert tmp_path in compiled.path.parents


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [v for v in variants() if v.label == "bf16 sender"]
    monkeypatch.setattr(command, "variants", lambda: few)
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    command.compile_kernels(arch=["sm_90", "sm_90"], jobs=1, as_json=False)
    cubins = list(tmp_path.glob("*/*.cubin"))
    assert len([path for path in cubins if not path.name.startswith(".")]) == len(few)


def test_json_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [v for v in variants() if v.label == "bf16 sender"]
    monkeypatch.setattr(command, "variants", lambda: few)
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        command.compile_kernels(arch=["sm_80"], jobs=1, as_json=True)
        table = json.loads(capsys.readouterr().out)
        assert [row["cached"] for row in table] == [cached] * len(few)
    assert [row["kernel"] for row in table] == [variant.kernel for variant in few]
    for row in table:
        assert Path(row["cubin"]).stat().st_size == row["cubin_bytes"]
        assert row["registers"] > 0


def test_exit_code_on_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_with_progress", lambda tasks, jobs: [outcome(SPILLED)])
    with pytest.raises(command.typer.Exit) as caught:
        command.compile_kernels(arch=["sm_90"], jobs=1, as_json=True)
    assert caught.value.exit_code == 1


def test_unknown_arch_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = run("--arch", "sm_91", cache=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: arch='sm_91': NVRTC" in done.stderr
    with pytest.raises(ConfigError):
        command.compile_kernels(arch=["sm_91"], jobs=1, as_json=True)
