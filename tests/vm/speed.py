"""``python tests/vm/speed.py``: the engine beside perftest, on one soft-RoCE device of a virtual
machine. Best of alternating runs. Takes two minutes.

Latency: half a round trip of 8 bytes. ib_write_lat polls memory for a plain write; ib_send_lat
polls for a completion and posts the receive again, as the engine does for its writes, which carry
an immediate. Both sides time each round trip and make the same of that (``half_round_trip``).
Bandwidth: 64 KiB writes, 16 under way.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

import transport_conformance as conformance
from forked import run_forked
from verbs_ends import SIZING, End

from moecomm.bench import transfer_programs as programs
from moecomm.bench.environment import environment
from moecomm.group import Group
from moecomm.transport.engine import EngineOptions, TransferEngine, jit
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.provider import Registration
from moecomm.transport.verbs import open_engine
from moecomm.transport.verbs.devices import choose_ports
from moecomm.transport.verbs.nic import VerbsNic
from vm import hops, machine
from vm.figures import half_round_trip, result, table
from vm.image import image
from vm.plugin import compile_for_guest, guest_environment

HOPS: Final = 3000
WARM_UP: Final = 300
WAKE_S: Final = 0.1  # perftest has no thread beside; this one's Python takes 0.1 ms and more a look
WINDOW: Final = 16
WRITES: Final = 400
NBYTES: Final = 65536
REPEATS: Final = 8
TIMEOUT_S: Final = 600.0


def _state(engine: TransferEngine, group: Group, nbytes: int) -> Block:
    memory = engine.allocate(NBYTES)
    remote = conformance.registered(engine, group, memory)[1 - group.rank]
    there, here = engine.remote_place(remote, 0), engine.local_place(memory, 0)
    block = Block(programs.STATE_BYTES)
    for offset, value in {
        programs.ENGINE: engine.state,
        programs.OP: engine.program_operations[0],
        programs.LOCAL: here.address,
        programs.LOCAL_KEY: here.key,
        programs.NBYTES: nbytes,
        programs.WINDOW: WINDOW,
        programs.FIRST: int(group.rank == 0),
        programs.TARGETS: 1,
        programs.TARGET: 1 - group.rank,
        programs.TARGET + 8: there.address,
        programs.TARGET + 16: there.key,
    }.items():
        block.put(offset, "=Q", value)
    return block


class Stopwatch:
    """Times of posts, in cycles, and what a cycle is."""

    def __init__(self) -> None:
        self.stamps: NDArray[np.int64] = np.zeros(HOPS + 1, np.int64)
        self.address = int(self.stamps.ctypes.data)
        self._start = hops.clock(), time.perf_counter_ns()

    def figures(self) -> tuple[float, float]:
        """See ``half_round_trip``."""
        cycles, ns = hops.clock() - self._start[0], time.perf_counter_ns() - self._start[1]
        return half_round_trip(self.stamps[: np.count_nonzero(self.stamps)], ns / cycles / 1e3)


def _run(engine: TransferEngine, group: Group, program: int, state: Block, count: int) -> None:
    """Run a program; both ranks come, one may have none (0)."""
    for offset, value in {
        programs.LEFT: count,
        programs.TURN: int(group.rank == 0),
        programs.START: 0,
        programs.END: 0,
    }.items():
        state.put(offset, "=Q", value)
    group.barrier()
    if program:
        engine.set_program(program, state.address)
        while state.words[programs.END // 8] == 0:
            time.sleep(WAKE_S)
    group.barrier()
    engine.set_program(0)


def latency(group: Group) -> tuple[float, float]:
    """``Stopwatch.figures`` of the engine."""
    # An idle worker takes a processor from soft-RoCE, which perftest's idle side does not.
    options = EngineOptions(spin_turns=1000, yield_turns=1 << 20)
    with open_engine(group, num_nics=1, options=options) as engine:
        state, watch = _state(engine, group, 8), Stopwatch()
        # First a few: what is translated for this machine when it first runs is not what is timed.
        for count in (WARM_UP, HOPS):
            watch.stamps[:] = 0
            state.put(hops.STAMP, "=Q", watch.address)
            _run(engine, group, hops.PINGPONG, state, count)
        return watch.figures()


def bandwidth(group: Group) -> float:
    """MB/s of rank 0's engine."""
    options = EngineOptions(spin_turns=1000, yield_turns=100)
    with open_engine(group, num_nics=1, options=options) as engine:
        state = _state(engine, group, NBYTES)
        _run(engine, group, programs.STREAM if group.rank == 0 else 0, state, WRITES)
        ns = state.words[programs.END // 8] - state.words[programs.START // 8]
        return WRITES * NBYTES * 1e3 / ns if group.rank == 0 else 0.0


def hooks_alone(group: Group) -> tuple[float, float]:
    """``Stopwatch.figures`` of the provider's hooks in a loop of their own."""
    nic = VerbsNic(choose_ports()[0], SIZING)
    try:
        nic.connect(group.all_gather(nic.address()), 30.0)
        end = End(nic, 4096)
        told = group.all_gather(json.dumps(dataclasses.astuple(end.registration)).encode())
        other = Registration(*json.loads(told[1 - group.rank]))
        post = end.write_to(other, 1 - group.rank, context=0, nbytes=8, imm=1)
        events = (ctypes.c_uint8 * 1024)()
        watch = Stopwatch()
        group.barrier()
        status = hops.by_hooks(
            nic.hooks.post,
            nic.hooks.poll,
            nic.hooks.state,
            ctypes.addressof(post),
            ctypes.addressof(events),
            HOPS,
            int(group.rank == 0),
            watch.address,
        )
        figures = watch.figures()
        assert status == 0
        group.barrier()
        return figures
    finally:
        nic.close()


def theirs(tool: str) -> tuple[float, ...]:
    """The same by perftest: its typical and average latency, or its average bandwidth."""
    command = [tool, "-s", "8", "-n", str(HOPS)]
    if tool.endswith("bw"):
        command = [tool, "-s", str(NBYTES), "-n", str(WRITES), "-t", str(WINDOW)]
    command += ["-d", "rxe0", "-x", "1", "-F"]
    numbers = [math.inf]
    while not all(map(math.isfinite, numbers)):  # it finds no rate of its clock on a busy machine
        numbers = _perftest(command)
    return (numbers[3] * 1.048576,) if tool.endswith("bw") else (numbers[4], numbers[5])


def _perftest(command: list[str]) -> list[float]:
    """The row of numbers that the client prints."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True)
            row = re.findall(r"^ *(?:8|65536) .*$", done.stdout, re.MULTILINE)
            if row:
                break
            assert time.monotonic() < deadline, done.stdout + done.stderr
            time.sleep(0.2)  # the server does not listen yet
        server.wait(30)
    finally:
        server.kill()
    return [float(n) for n in row[0].split()]


def prepare() -> None:
    """Compile what ranks load: once, before they are forked."""
    jit.load("moecomm.transport.verbs.hooks", "moecomm.transport.engine.loop")


def _measure(results: Path) -> None:
    """In the virtual machine."""
    prepare()
    latencies, bandwidths = collections.defaultdict(list), collections.defaultdict(list)
    for _ in range(REPEATS):
        for tool in ("ib_write_lat", "ib_send_lat"):
            latencies[tool].append(theirs(tool))
        latencies["hooks"].append(run_forked(hooks_alone, 2)[0])
        latencies["engine"].append(run_forked(latency, 2)[0])
        bandwidths["ib_write_bw"].append(theirs("ib_write_bw")[0])
        bandwidths["engine"].append(run_forked(bandwidth, 2)[0])
        for sides in (latencies, bandwidths):
            print({side: runs[-1] for side, runs in sides.items()}, flush=True)  # noqa: T201
    rows = [
        result(what, "us", {side: [run[n] for run in runs] for side, runs in latencies.items()})
        for n, what in enumerate(("typical", "average"))
    ]
    rows.append(result("64 KiB writes", "MB/s", bandwidths))
    results.write_text(json.dumps(rows))


def main() -> int:
    """Compile, boot a machine, measure in there, print."""
    control = Path("/control")
    if (control / "command").exists():  # this is in there
        _measure(control / "results")
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all runs here, too")
    file: Path | None = parser.parse_args().json
    compile_for_guest(["vm.speed"], guest_environment(), Path.cwd())
    options = machine.Options(environment=guest_environment())
    command = [sys.executable, __file__]
    where = environment() | {"options": {"hops": HOPS, "repeats": REPEATS}}
    with tempfile.TemporaryDirectory(prefix="moecomm-vm-") as folder:
        control = Path(folder)
        status = machine.boot(image(), command, control, sys.stdout.buffer, TIMEOUT_S, options)
        if status:
            return status
        results = json.loads((control / "results").read_text())
    if file is not None:
        where["load"] = os.getloadavg()
        file.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")
    print(table(results))  # noqa: T201
    print(f"{results[-1]['what']}: {results[-1]['best']}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
