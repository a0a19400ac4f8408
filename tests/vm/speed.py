"""``python tests/vm -- python tests/vm/speed.py``: the engine beside perftest, on one soft-RoCE
device. Prints one line of JSON: the best of alternating runs (other work on the machine only adds),
and ratios.

Latency: half a round trip of 8 bytes. ib_write_lat polls memory for a plain write; ib_send_lat
polls for a completion and posts the receive again, as the engine does for its writes, which carry
an immediate. Bandwidth: 64 KiB writes, 16 under way.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import transport_conformance as conformance
from forked import run_forked
from verbs_ends import SIZING, End

from moecomm.bench import transfer_programs as programs
from moecomm.group import Group
from moecomm.transport.engine import EngineOptions, TransferEngine, jit
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.native import c_function, ld32
from moecomm.transport.engine.provider import Registration
from moecomm.transport.engine.records import ARRIVED, EVENT_BYTES, SENT
from moecomm.transport.verbs import open_engine
from moecomm.transport.verbs.devices import choose_ports
from moecomm.transport.verbs.nic import VerbsNic

HOPS: Final = 3000
WARM_UP: Final = 300
WAKE_S: Final = 0.1  # perftest has no thread beside; this one's Python takes 0.1 ms and more a look
WINDOW: Final = 16
WRITES: Final = 400
NBYTES: Final = 65536
REPEATS: Final = 4


def _state(engine: TransferEngine, group: Group, lat: bool) -> Block:
    memory = engine.allocate(NBYTES)
    remote = conformance.registered(engine, group, memory)[1 - group.rank]
    there, here = engine.remote_place(remote, 0), engine.local_place(memory, 0)
    block = Block(programs.STATE_BYTES)
    for offset, value in {
        programs.ENGINE: engine.state,
        programs.OP: engine.program_operations[0],
        programs.LOCAL: here.address,
        programs.LOCAL_KEY: here.key,
        programs.NBYTES: 8 if lat else NBYTES,
        programs.WINDOW: WINDOW,
        programs.FIRST: int(group.rank == 0),
        programs.TARGETS: 1,
        programs.TARGET: 1 - group.rank,
        programs.TARGET + 8: there.address,
        programs.TARGET + 16: there.key,
    }.items():
        block.put(offset, "=Q", value)
    return block


def ours(group: Group, which: str) -> float:
    """Microseconds of half a round trip, or MB/s."""
    lat = which == "latency"
    # An idle worker takes a processor from soft-RoCE, which perftest's idle side does not.
    options = EngineOptions(spin_turns=1000, yield_turns=1 << 20 if lat else 100)
    with open_engine(group, num_nics=1, options=options) as engine:
        state = _state(engine, group, lat)
        words = state.words
        # First a few: what is translated for this machine when it first runs is not what is timed.
        for count in (WARM_UP, HOPS) if lat else (WRITES,):
            state.put(programs.LEFT, "=Q", count)
            state.put(programs.TURN, "=Q", int(group.rank == 0))
            state.put(programs.START, "=Q", 0)
            state.put(programs.END, "=Q", 0)
            group.barrier()
            if lat or group.rank == 0:
                engine.set_program(programs.PINGPONG if lat else programs.STREAM, state.address)
                while words[programs.END // 8] == 0:
                    time.sleep(WAKE_S)
            group.barrier()
            engine.set_program(0)
        if not lat and group.rank == 1:
            return 0.0
        seconds = (words[programs.END // 8] - words[programs.START // 8]) / 1e9
        return seconds / HOPS / 2 * 1e6 if lat else WRITES * NBYTES / 1e6 / seconds


_c_hook = c_function("i64", "i64", "i64", "i64")


@jit.inner
def _count(events, got, kind):  # type: ignore[no-untyped-def]
    found = 0
    for n in range(got):
        if ld32(events + n * EVENT_BYTES) == kind:
            found += 1
    return found


@jit.hot("int64(int64,int64,int64,int64,int64,int64,int64)")
def _hops(post, poll, state, record, events, hops, first):  # type: ignore[no-untyped-def]
    """``hops`` round trips by the hooks alone."""
    sent = 1
    for n in range(hops):
        if first != 0 or n > 0:
            while sent == 0:
                sent += _count(events, _c_hook(poll, state, events, 8), SENT)
            sent = 0
            if _c_hook(post, state, record, 1) != 1:
                return -1
        came = 0
        while came == 0:
            got = _c_hook(poll, state, events, 8)
            if got < 0:
                return got
            came = _count(events, got, ARRIVED)
            sent += _count(events, got, SENT)
    if first == 0:
        _c_hook(post, state, record, 1)
    return 0


def hooks_alone(group: Group) -> float:
    """Microseconds of half a round trip, by the provider's hooks in a loop of their own."""
    nic = VerbsNic(choose_ports()[0], SIZING)
    try:
        nic.connect(group.all_gather(nic.address()), 30.0)
        end = End(nic, 4096)
        told = group.all_gather(json.dumps(dataclasses.astuple(end.registration)).encode())
        other = Registration(*json.loads(told[1 - group.rank]))
        post = end.write_to(other, 1 - group.rank, context=0, nbytes=8, imm=1)
        events = (ctypes.c_uint8 * 1024)()
        group.barrier()
        start = time.perf_counter()
        status = _hops(
            nic.hooks.post,
            nic.hooks.poll,
            nic.hooks.state,
            ctypes.addressof(post),
            ctypes.addressof(events),
            HOPS,
            int(group.rank == 0),
        )
        seconds = time.perf_counter() - start
        assert status == 0
        group.barrier()
        return seconds / HOPS / 2 * 1e6
    finally:
        nic.close()


def theirs(tool: str) -> float:
    """The same by perftest: its average latency, its average bandwidth."""
    command = [tool, "-s", "8", "-n", str(HOPS)]
    if tool.endswith("bw"):
        command = [tool, "-s", str(NBYTES), "-n", str(WRITES), "-t", str(WINDOW)]
    command += ["-d", "rxe0", "-x", "1", "-F"]
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
    numbers = [float(n) for n in row[0].split()]
    return numbers[3] * 1.048576 if tool.endswith("bw") else numbers[5]


def main() -> None:
    runs: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(REPEATS):
        for tool in ("ib_write_lat", "ib_send_lat", "ib_write_bw"):
            runs[tool].append(theirs(tool))
        runs["latency hooks"].append(run_forked(hooks_alone, 2)[0])
        runs["latency engine"].append(run_forked(ours, 2, "latency")[0])
        runs["bandwidth engine"].append(run_forked(ours, 2, "bandwidth")[0])
    for name, values in runs.items():
        print(name, [round(value, 1) for value in values], flush=True)  # noqa: T201
    best = {n: (min if "lat" in n else max)(values) for n, values in runs.items()}
    for ours_, theirs_ in (
        ("latency hooks", "ib_write_lat"),
        ("latency hooks", "ib_send_lat"),
        ("latency engine", "ib_write_lat"),
        ("latency engine", "ib_send_lat"),
        ("bandwidth engine", "ib_write_bw"),
    ):
        best[f"{ours_} / {theirs_}"] = best[ours_] / best[theirs_]
    print(json.dumps({name: round(value, 2) for name, value in best.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
