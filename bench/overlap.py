"""What runs when while a dispatch is under way between nodes: a trace of GPUs and network.

    python bench/overlap.py --ranks 2 --node-size 1 --tokens 128 --out FILE.json [--svg FILE.svg]
    python bench/overlap.py --draw FILE.json --svg FILE.svg

Matrix products that last longer than the exchange run between the two halves. Every kernel of the
exchange has events around it, on whichever stream it is; the host watches the words that kernels
and mover write for each other. All of it on one clock, the host's: GPU times are right to about
3 µs. Of the rounds the one with the median step is kept (a step: from dispatch_send's begin to
dispatch_recv's end, the slower rank's), in the format of chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import drawing
from network import alone_us, products_of

import moecomm as mc
from moecomm.bench.environment import environment
from moecomm.bench.options import Options
from moecomm.bench.worker import Exchange, right_exchange
from moecomm.cuda_driver import call, driver
from moecomm.remote import CHANNEL_HEAD, CHANNEL_RECORDS, WORD
from moecomm.remote_words import Door, RemoteWords

ROUNDS = 41
AHEAD_US = 300.0  # from the last rank's launches to the moment at which all GPUs begin
PRODUCTS = "products"
Span = tuple[str, str, float, float]  # lane, name, begin and end in µs of the host's clock


def main() -> None:
    parser = argparse.ArgumentParser(description="trace of a dispatch between pretended nodes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--node-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--transport", default="efa")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, help="draw this trace, measure nothing")
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    trace = json.loads(given.draw.read_text()) if given.draw else measured(given)
    if given.out is not None:
        given.out.write_text(json.dumps(trace, indent=1) + "\n")
    if given.svg is not None:
        given.svg.write_text(drawing.svg(trace))


def measured(given: argparse.Namespace) -> dict[str, Any]:
    os.environ["MOECOMM_NODE_SIZE"] = str(given.node_size)
    os.environ.setdefault("MOECOMM_FABRIC", "tcp")
    options = Options(ranks=given.ranks, tokens=(given.tokens,), layouts=("rank",), wire="flags")
    reports = mc.run(
        rounds_of, given.ranks, options, device="cuda", transport=given.transport, timeout_s=300
    )
    rounds = list(zip(*reports, strict=True))
    steps = [max(step_us(spans) for spans in one) for one in rounds]
    number = sorted(range(ROUNDS), key=steps.__getitem__)[ROUNDS // 2]
    events = events_of(rounds[number])
    result = {"kind": "overlap", "num_tokens": given.tokens, "correct": True}
    result |= figures(events)
    return {"environment": environment(), "results": [result], "traceEvents": events}


def rounds_of(group: mc.Group, options: Options) -> list[list[Span]]:
    """The spans that this rank sees, of every round."""
    torch = importlib.import_module("torch")
    (case,) = options.cases()
    with mc.MoeComm(options.config(case), group) as comm:
        exchange = right_exchange(comm, case, options.seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            products = products_of(1.3 * alone_us(exchange)["dispatch"])
            watch, found = Watch(comm), []
            for _ in range(ROUNDS):
                group.barrier(60)
                found.append(watch.round(exchange, products))
        comm.check()
        group.barrier(60)
    return found


class Watch:
    """Sees one communicator's kernels and words."""

    def __init__(self, comm: mc.MoeComm) -> None:
        self._torch = importlib.import_module("torch")
        self._comm = comm
        runtime: Any = comm._runtime
        self._kernels = runtime._kernels
        self._plain_launch = self._kernels.launch
        areas = comm.layout.areas
        assert areas is not None
        where, slots = RemoteWords(areas, comm.group.rank), range(comm.config.in_flight)
        self._names = {where.door(slot, Door.HEAD): "pushed" for slot in slots}
        for peer in range(comm.group.size):  # those of this node write no such words
            for slot in slots:
                for channel in range(CHANNEL_HEAD, CHANNEL_RECORDS + 2):
                    self._names[where.arrived(slot, peer, channel)] = f"from {peer}"
        count = areas.flags.nbytes // WORD
        self._words = (ctypes.c_uint64 * count).from_address(runtime.remote_flags)
        self._marks: list[tuple[str, str, Any, Any]] = []
        self._gate = self._torch.zeros(1, dtype=self._torch.int64).pin_memory()

    def round(self, exchange: Exchange, products: Any) -> list[Span]:
        """One exchange, whose dispatch is seen."""
        torch, self._marks = self._torch, []
        mine = torch.cuda.current_stream()
        self._kernels.launch = self._launch
        base, base_us = self._anchor()
        self._hold(mine)
        handle = exchange.dispatch_send()
        self._between(PRODUCTS, mine, products)
        self._comm.dispatch_recv(handle)
        self._kernels.launch = self._plain_launch
        over = self._event(mine)
        self._begin()
        seen = self._look(over)
        self._comm.combine_send(exchange.y, handle)
        exchange.combine_recv(handle)
        torch.cuda.synchronize()

        def us(event: Any) -> float:
            return base_us + float(base.elapsed_time(event)) * 1e3

        return seen + [(lane, name, us(begin), us(end)) for lane, name, begin, end in self._marks]

    def _anchor(self) -> tuple[Any, float]:
        """An event, and the host's time of it in µs, at most some µs late."""
        self._torch.cuda.synchronize()
        base = self._event(self._torch.cuda.current_stream())
        while not base.query():
            pass
        return base, time.perf_counter_ns() / 1e3

    def _hold(self, stream: Any) -> None:
        """Nothing queued from now on begins before ``_begin``."""
        self._gate[0] = 0
        at_least = driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        call(driver().cuStreamWaitValue64, stream.cuda_stream, self._gate.data_ptr(), 1, at_least)

    def _begin(self) -> None:
        """On all ranks at once: their processes have the same clock."""
        now = str(time.perf_counter_ns() / 1e3).encode()
        start = max(float(told) for told in self._comm.group.all_gather(now, 60)) + AHEAD_US
        while time.perf_counter_ns() / 1e3 < start:
            pass
        self._gate[0] = 1

    def _event(self, stream: Any) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _between(self, name: str, stream: Any, work: Any) -> None:
        begin = self._event(stream)
        work()
        self._marks.append((self._lane(name, stream), name, begin, self._event(stream)))

    def _launch(
        self, stage: str, block: Any, tokens: int, code: int, stream: int, **more: Any
    ) -> None:
        where = self._torch.cuda.ExternalStream(stream)
        self._between(
            stage, where, lambda: self._plain_launch(stage, block, tokens, code, stream, **more)
        )

    def _lane(self, name: str, stream: Any) -> str:
        mine = stream.cuda_stream == self._torch.cuda.current_stream().cuda_stream
        return "caller's stream" if mine else f"{name.split('_')[1]} beside"

    def _look(self, over: Any) -> list[Span]:
        """When words first changed, until an event."""
        before = {word: self._words[word] for word in self._names}
        seen: list[Span] = []
        while before and not over.query():
            for word in [w for w, value in before.items() if self._words[w] != value]:
                now = time.perf_counter_ns() / 1e3
                seen.append(("words", self._names[word], now, now))
                del before[word]
        return seen


def step_us(spans: list[Span]) -> float:
    ends = [end for lane, name, _, end in spans if name == "dispatch_recv"]
    return max(ends) - min(begin for _, name, begin, _ in spans if name == "dispatch_send")


def events_of(ranks: tuple[list[Span], ...]) -> list[dict[str, Any]]:
    """The spans of one round as trace events; µs since the first kernel began. What is under way
    on the network to a rank: from when the sender's push has rung to the last that has come."""
    zero = min(begin for spans in ranks for _, name, begin, _ in spans if name == "dispatch_send")
    found = []

    def add(rank: int, lane: str, name: str, begin: float, end: float) -> None:
        times = {"ts": round(begin - zero, 1), "dur": round(end - begin, 1)}
        found.append({"ph": "X", "pid": f"rank {rank}", "tid": lane, "name": name, **times})

    pushed = [min(t for _, name, t, _ in spans if name == "pushed") for spans in ranks]
    for rank, spans in enumerate(ranks):
        for lane, name, begin, end in sorted(spans, key=lambda span: span[2]):
            if lane != "words":
                add(rank, lane, name, begin, end)
        for sender in range(len(ranks)):
            came = [t for _, name, t, _ in spans if name == f"from {sender}"]
            if came:
                add(rank, "network", f"from rank {sender}", pushed[sender], max(came))
    return found


def figures(events: list[dict[str, Any]]) -> dict[str, float]:
    """µs, of the rank where it took longest."""

    def longest(what: str) -> float:
        return max(float(e["dur"]) for e in events if what in (e["name"], e["tid"]))

    ranks = {e["pid"] for e in events}
    steps = []
    for rank in ranks:
        mine = [e for e in events if e["pid"] == rank and e["tid"] == "caller's stream"]
        steps.append(max(e["ts"] + e["dur"] for e in mine) - min(e["ts"] for e in mine))
    return {
        "step_us": round(max(steps), 1),
        "products_us": longest(PRODUCTS),
        "network_us": longest("network"),
    }


if __name__ == "__main__":
    main()
