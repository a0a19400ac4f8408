"""The steps of ``ep8.sh``, one after the other, each within its share of the time that is left."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TRANSPORTS = ("nvlink", "nvshmem")
# The published case: hidden 7168, top-8 of 256 experts, fp8 to the experts, bfloat16 back.
PROBLEM = (
    "tokens=1,8,64,128,512,4096", "layouts=batched,grouped,rank", "routings=uniform,zipf",
    "hidden=7168", "num_experts=256", "top_k=8", "dispatch_dtypes=float8_e4m3fn",
    "input_dtypes=bfloat16", "combine_dtype=bfloat16", "reduce=sender",
)  # fmt: skip
KILL_AFTER_S = 5
WRITE_S = 10  # of a step's time, kept for writing down what has been measured


@dataclass(frozen=True)
class Step:
    """``command`` with more ``variables``; ``share``: its part of the time, beside the others'.

    ``timed``: it takes budget_s and timeout_s, and can so keep what it has when time runs out.
    """

    name: str
    command: tuple[str, ...]
    share: float
    variables: dict[str, str] = field(default_factory=dict)
    timed: bool = False

    def within(self, limit_s: float) -> list[str]:
        """The whole command line; it ends after ``limit_s`` seconds."""
        words = ["timeout", f"--kill-after={KILL_AFTER_S}", f"{limit_s:.0f}"]
        words += ["env", *(f"{name}={value}" for name, value in self.variables.items())]
        words += self.command
        if self.timed:
            inner = max(1.0, limit_s - WRITE_S)
            # The last case that begins in time shall also end in time.
            words += [f"budget_s={0.8 * inner:.0f}", f"timeout_s={inner:.0f}"]
        return words


def tests(transports: Sequence[str], shared: bool) -> Step:
    """The GPU tests at 4 and 8 ranks. ``shared``: ranks may share GPUs."""
    chosen = " or ".join(transports)
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider",
               "-o", "faulthandler_timeout=0", "tests/test_gpu_many.py", "-k", chosen)  # fmt: skip
    variables = {"MOECOMM_TEST_STRICT": "1"} | ({"MOECOMM_TEST_SHARED_GPUS": "1"} if shared else {})
    return Step("tests", command, 3, variables)


def bench(folder: Path, ranks: int, transport: str, *more: str, share: float = 2) -> Step:
    name = f"ep{ranks}-{transport}" + ("-check" if more else "")
    command = (sys.executable, "-m", "moecomm.bench", f"json={folder / name}.json",
               f"ranks={ranks}", f"transport={transport}", *PROBLEM,
               "pairs=10", "replays=50", *more)  # fmt: skip
    return Step(name, command, share, timed=True)


def plan(folder: Path, transports: Sequence[str], rehearse: bool) -> list[Step]:
    """What comes first is what matters most: time may run out."""
    if rehearse:
        check = ("check_only=yes", "nccl=no", "tokens=1,128")
        return [
            tests(transports, shared=True),
            bench(folder, 8, "nvlink", *check),
            *(bench(folder, 2, transport) for transport in transports),
        ]
    return [
        tests(transports, shared=False),
        *(bench(folder, ranks, transport) for ranks in (8, 4) for transport in transports),
    ]


def perform(steps: Sequence[Step], folder: Path, limit_s: float) -> list[dict[str, object]]:
    """Run all steps; what each ended with. None is left out because another failed."""
    deadline = time.monotonic() + limit_s
    ends: list[dict[str, object]] = []
    for number, step in enumerate(steps):
        shares = sum(later.share for later in steps[number:])
        mine = max(1.0, (deadline - time.monotonic()) * step.share / shares - KILL_AFTER_S)
        command = step.within(mine)
        say(f"== {step.name}: at most {mine:.0f} s: {shlex.join(command)}")
        began = time.monotonic()
        code = follow(command, folder / f"{step.name}.log")
        took = time.monotonic() - began
        how = {0: "passed", 124: "out of time", 137: "out of time"}.get(code, f"exit code {code}")
        say(f"== {step.name}: {how} after {took:.0f} s")
        ends.append({"step": step.name, "code": code, "how": how, "seconds": round(took, 1)})
    return ends


def follow(command: Sequence[str], log: Path) -> int:
    """Run, show what it writes, and keep that in ``log``."""
    with log.open("wb") as output, log.open("rb") as seen:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            show(seen)
            time.sleep(0.3)
        show(seen)
    return process.returncode


def show(seen: IO[bytes]) -> None:
    sys.stdout.write(seen.read().decode(errors="replace"))
    sys.stdout.flush()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for results and logs")
    parser.add_argument("--rehearse", action="store_true", help="on two GPUs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="separated by commas")
    parser.add_argument("--limit", type=float, default=465, help="seconds for everything")
    given = parser.parse_args(arguments)
    steps = plan(given.folder, given.transports.split(","), given.rehearse)
    if given.dry_run:
        shares = sum(step.share for step in steps)
        for step in steps:
            say(shlex.join(step.within(given.limit * step.share / shares)))
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    ends = perform(steps, given.folder, given.limit)
    summary = {"rehearsal": given.rehearse, "steps": ends, "python": sys.version,
               "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}  # fmt: skip
    (given.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for end in ends:
        say(f"{end['step']:<20} {end['seconds']:>6} s  {end['how']}")
    failures = [end for end in ends if end["code"] != 0]
    say(f"{len(failures)} of {len(ends)} steps failed" if failures else "all steps passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
