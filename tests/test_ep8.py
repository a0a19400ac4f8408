"""``bench/ep8.sh`` without GPUs: what its commands mean, its limits and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moecomm as mc
from moecomm.bench.__main__ import parse
from moecomm.bench.options import Options
from moecomm.bench.prepare import layouts, variants

ROOT = Path(__file__).parent.parent
TOKENS = (1, 8, 64, 128, 512, 4096)


@pytest.fixture(scope="module")
def ep8() -> Any:
    spec = importlib.util.spec_from_file_location("ep8", ROOT / "bench" / "ep8.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ep8"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def commands(*arguments: str) -> list[list[str]]:
    script = ROOT / "bench" / "ep8.sh"
    done = subprocess.run(
        ["bash", str(script), "--dry-run", *arguments, "out"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [shlex.split(line) for line in done.stdout.splitlines()]


def measured(line: list[str]) -> tuple[Options, Path | None]:
    """What the bench would do; and that it is stopped in time."""
    options, target = parse(line[line.index("moecomm.bench") + 1 :])
    assert line[0] == "timeout"
    assert options.budget_s is not None
    assert options.budget_s < options.timeout_s < float(line[2])
    return options, target


def test_the_plan_of_eight_gpus() -> None:
    tests, *benches = commands()
    assert (ROOT / tests[tests.index("-k") - 1]).is_file()
    assert "MOECOMM_TEST_STRICT=1" in tests
    assert not any("SHARED" in word for word in tests)
    assert sum(float(line[2]) for line in (tests, *benches)) < 480
    runs = [measured(line) for line in benches]
    assert [(run.ranks, run.transport) for run, _ in runs] == [
        (8, "nvlink"), (8, "nvshmem"), (4, "nvlink"), (4, "nvshmem"),
    ]  # fmt: skip
    assert len({target for _, target in runs}) == 4
    for run, _ in runs:
        assert (run.hidden, run.top_k, run.num_experts) == (7168, 8, 256)
        assert run.tokens == TOKENS
        assert len(list(run.cases())) == len(TOKENS) * 3 * 2
        assert run.nccl
        assert not run.check_only
        assert {layout.cfg.layout for layout in layouts(run)} == {"batched", "grouped", "rank"}
        assert len(variants(layouts(run))) == 18 * (4 + 4)  # x in fp8, or in three others


def test_the_rehearsal_on_two_gpus() -> None:
    tests, *benches = commands("--rehearse", "--transports", "nvlink")
    assert "MOECOMM_TEST_SHARED_GPUS=1" in tests
    (check, _), (figures, target) = map(measured, benches)
    assert (check.ranks, check.check_only, check.nccl) == (8, True, False)
    assert (figures.ranks, figures.check_only, figures.tokens) == (2, False, TOKENS)
    assert target == Path("out/ep2-nvlink.json")


def test_steps_end_in_time_and_failures_are_counted(
    ep8: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = sys.executable
    steps = [
        ep8.Step(
            "good", (python, "-c", "import os; print(os.environ['WORD'])"), 1, {"WORD": "seen"}
        ),
        ep8.Step("bad", (python, "-c", "raise SystemExit(3)"), 1),
        ep8.Step("slow", (python, "-c", "import time; time.sleep(60)"), 1),
        ep8.Step("last", (python, "-c", "print('there')"), 1),
    ]
    monkeypatch.setattr(ep8, "plan", lambda *_: steps)
    monkeypatch.setattr(ep8, "KILL_AFTER_S", 0.5)
    assert ep8.main(["--limit", "16", str(tmp_path)]) == 1
    ends = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert [end["how"] for end in ends] == ["passed", "exit code 3", "out of time", "passed"]
    assert (tmp_path / "good.log").read_text() == "seen\n"
    assert "there" in capfd.readouterr().out


def test_words_that_mean_nothing_are_refused() -> None:
    for word in ("rank=8", "ranks", "ranks=many", "nccl=perhaps", "tokens=1;2", "layouts=round"):
        with pytest.raises(mc.ConfigError, match=word.partition("=")[0]):
            parse([word])
