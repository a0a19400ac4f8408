"""Process mode: ranks are processes on shared memory; waits really wait, and can be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator_programs import program
from emulator_ring import WORDS, Ring

from moecomm.emulator import ProcessWorld

HERE = Path(__file__).parent


class Workers:
    """Processes of ``emulator_worker.py``; those that still run when the test ends are killed."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *args: object, **environment: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, str(HERE / "emulator_worker.py"), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self.all.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> str:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out

    def close(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


def shared_file(tmp_path: Path, num_ranks: int) -> Path:
    file = tmp_path / "memory"
    file.write_bytes(bytes(num_ranks * num_ranks * WORDS * 8))
    return file


def test_ranks_in_processes(tmp_path: Path, workers: Workers) -> None:
    program("schedule").prepare()
    file = shared_file(tmp_path, 3)
    ranks = [workers.start("ring", file, rank, 3, 200, 30) for rank in range(3)]
    for process in ranks:
        lines = [line.split() for line in workers.finish(process).splitlines()]
        assert [line[:3] for line in lines] == [[str(e), "1", "1"] for e in range(1, 201)]


def test_a_missing_process_is_waited_for_as_long_as_asked(tmp_path: Path, workers: Workers) -> None:
    file = shared_file(tmp_path, 2)
    alone = workers.start("ring", file, 0, 2, 1, 0.3)
    epoch, came, _, waited = workers.finish(alone).split()
    assert (epoch, came) == ("1", "0")
    assert int(waited) >= 300_000_000


def test_a_long_wait_leaves_the_processor_to_others() -> None:
    ring = Ring(2)
    with ProcessWorld(program("schedule")) as world:
        before = time.process_time()
        world.launch("ring", ring.args(0, timeout_s=1.0), 1, 64)
        assert time.process_time() - before < 0.5
    assert ring.out[0, 0] == 0


def test_two_worlds_of_one_process_run_side_by_side() -> None:
    """Ranks in threads: a launch releases the GIL and has its own stacks."""
    ring = Ring(2)
    results: dict[int, list[int]] = {}

    def rank_main(rank: int) -> None:
        with ProcessWorld(program("schedule")) as world:
            world.launch("ring", ring.args(rank, timeout_s=30), 1, 64)
            results[rank] = [int(v) for v in ring.out[rank]]

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in range(2):
        assert results[rank][0] == 1
        assert results[rank][2:4] == ring.sums


def test_ctrl_c_ends_a_wait() -> None:
    ring = Ring(2)
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        with ProcessWorld(program("schedule")) as world:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                world.launch("ring", ring.args(0), 1, 64)
            assert time.monotonic() - begin < 5
            ring.memory[0, 0] = 1  # the world is as good as new
            world.launch("ring", ring.args(0), 1, 64)
            assert ring.out[0, 0] == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_stacks_are_reused() -> None:
    """A launch of many threads again and again does not grow the process."""
    ring = Ring(1)
    ring.out = np.zeros((1, 256 * 64 * 4), np.uint64)
    with ProcessWorld(program("schedule")) as world:
        args = ring.args(0)
        world.launch("order", args, 64, 256)
        first = _resident_bytes()
        for _ in range(20):
            world.launch("order", args, 64, 256)
        assert _resident_bytes() - first < 8 << 20


def _resident_bytes() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc to see the size of this process")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_sixteen_processes_build_into_one_cold_cache(tmp_path: Path, workers: Workers) -> None:
    """G01: Each compiles nothing that another has compiled."""
    log = tmp_path / "log"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo "$*" >> {log};; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    cache = {"MOECOMM_CACHE_DIR": str(tmp_path / "cache"), "MOECOMM_CXX": str(compiler)}
    builders = [workers.start("build", **cache) for _ in range(16)]
    assert [workers.finish(builder) for builder in builders] == ["3\n"] * 16
    compiled = [
        Path(line.split()[-1]).name for line in log.read_text().splitlines() if " -c " in line
    ]
    assert sorted(compiled) == ["emulator_runtime.cpp", "primitives.cpp"]
