"""Clocks: replayed graphs, events inside them, and the host's own time."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from moecomm.cuda_driver import call, current

WARM_UP: Final = 10


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def capture(work: Callable[[], Any]) -> Any:
    """A graph of what ``work`` queues on torch's current stream."""
    torch = importlib.import_module("torch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graph: Any, replays: int, parts: int) -> list[float]:
    """Microseconds of one of ``parts`` equal parts of the graph, for each of ``replays``."""
    torch = importlib.import_module("torch")
    for _ in range(WARM_UP):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return [a.elapsed_time(b) * 1e3 / parts for a, b in pairs]


class Marks:
    """Events that a graph records, so that parts of it can be told apart."""

    def __init__(self, index: int, count: int) -> None:
        self._index = index
        with current(index) as cu:
            self._events = [call(cu.cuEventCreate, 0) for _ in range(count)]

    def record(self, number: int) -> None:
        """Put event ``number`` here on torch's current stream, which is being captured."""
        torch = importlib.import_module("torch")
        with current(self._index) as cu:
            outside = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
            stream = torch.cuda.current_stream().cuda_stream
            call(cu.cuEventRecordWithFlags, self._events[number], stream, int(outside))

    def us(self, begin: int, end: int) -> float:
        """Microseconds between two events of the last replay, which has ended."""
        with current(self._index) as cu:
            return float(call(cu.cuEventElapsedTime, self._events[begin], self._events[end])) * 1e3

    def close(self) -> None:
        with current(self._index) as cu:
            while self._events:
                call(cu.cuEventDestroy, self._events.pop())


class HostClock:
    """Collects how long calls keep the host: ``start``, the call, ``stop``."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, name: str) -> None:
        ended = time.perf_counter()  # before anything else is done
        self.us.setdefault(name, []).append((ended - self._began) * 1e6)
