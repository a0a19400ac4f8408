"""What one rank of a measurement does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from moecomm.bench import nccl
from moecomm.bench.inputs import Inputs, make_inputs
from moecomm.bench.link import Link, busiest_rows, measure_link, rows_to_ranks
from moecomm.bench.options import Case, Options
from moecomm.bench.oracle import Oracle, differs
from moecomm.bench.timing import HostClock, Marks, capture, percentile, replay_us
from moecomm.comm import MoeComm
from moecomm.cuda_driver import free_bytes
from moecomm.dtypes import itemsize
from moecomm.group import Group
from moecomm.handle import Handle, Received
from moecomm.layout import Layout
from moecomm.runtime.devices import choose_index

logger = logging.getLogger(__name__)

HALVES: Final = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
CHECKED: Final = 3  # exchanges before anything is timed
MARKED_REPLAYS: Final = 100
HOST_PAIRS: Final = 100
SYNC_S: Final = 120.0
NO_TIME: Final = "no time left"
Record = dict[str, Any]


def bench_rank(group: Group, options: Options) -> dict[str, Any]:
    """Every case in turn; a record for each. ``link`` and ``uuids`` are equal on all ranks."""
    torch = importlib.import_module("torch")
    index = choose_index(group, None, SYNC_S)
    torch.cuda.set_device(index)
    deadline = time.monotonic() + (options.budget_s or math.inf)
    _say(group, "measuring the link")
    link, uuids = measure_link(group, index)
    records = []
    with contextlib.ExitStack() as scope:
        distributed = None
        if options.nccl and not options.check_only and len(set(uuids)) == group.size > 1:
            _say(group, "starting NCCL")
            distributed = scope.enter_context(nccl.process_group(group, index))
        for case in options.cases():
            if any(group.all_gather(b"late" if time.monotonic() > deadline else b"", SYNC_S)):
                records.append({"skipped": NO_TIME})
                continue
            _say(group, " ".join(str(value) for value in dataclasses.astuple(case)))
            bench = _CaseBench(group, options, case, index, link, uuids)
            records.append(bench.run(distributed))
            torch.cuda.empty_cache()
    return {"link": dataclasses.asdict(link), "uuids": uuids, "records": records}


class Exchange:
    """One rank's part of a pair, on tensors that stay where they are."""

    def __init__(self, comm: MoeComm, inputs: Inputs) -> None:
        torch = importlib.import_module("torch")
        me, cfg = comm.group.rank, comm.config
        self.comm = comm
        self._x, self._idx = inputs.x[me].contiguous(), inputs.idx[me].contiguous()
        self._scale = None if inputs.given_scale is None else inputs.given_scale[me].contiguous()
        weights = inputs.weights[me].contiguous()
        travel = cfg.layout == "rank" or cfg.weights_travel
        self._early: Any = weights if travel else None
        self._late: Any = None if travel else weights
        dtype = getattr(torch, cfg.combine_dtype)
        self.y: Any = None
        self.out = torch.empty(len(self._x), cfg.hidden, dtype=dtype, device=self._x.device)

    def dispatch_send(self) -> Handle:
        return self.comm.dispatch_send(self._x, self._idx, self._early, self._scale)

    def combine_recv(self, handle: Handle) -> Any:
        return self.comm.combine_recv(handle, self._late, out=self.out)

    def pair(self, mark: Callable[[int], None] = lambda number: None) -> None:
        """All four halves; ``mark`` is called before each and after the last."""
        mark(0)
        handle = self.dispatch_send()
        mark(1)
        self.comm.dispatch_recv(handle)
        mark(2)
        self.comm.combine_send(self.y, handle)
        mark(3)
        self.combine_recv(handle)
        mark(4)

    def timed_pair(self, clock: HostClock) -> None:
        """The same, by the host's clock, which sees the halves alone."""
        comm, x, idx, early, scale = self.comm, self._x, self._idx, self._early, self._scale
        clock.start()
        handle = comm.dispatch_send(x, idx, early, scale)
        clock.stop(HALVES[0])
        clock.start()
        comm.dispatch_recv(handle)
        clock.stop(HALVES[1])
        clock.start()
        comm.combine_send(self.y, handle)
        clock.stop(HALVES[2])
        clock.start()
        comm.combine_recv(handle, self._late, self.out)
        clock.stop(HALVES[3])


class _CaseBench:
    """One case on this rank."""

    def __init__(
        self,
        group: Group,
        options: Options,
        case: Case,
        index: int,
        link: Link,
        uuids: list[str],
    ) -> None:
        self._group, self._options, self._case = group, options, case
        self._index, self._link, self._uuids = index, link, uuids
        self._cfg = options.config(case)
        self._device = f"cuda:{index}"

    def run(self, distributed: Any) -> Record:
        """Check, then measure. ``skipped`` says why there is nothing else."""
        layout = Layout(self._cfg, self._group.size, self._group.rank)
        need, free = _bytes_needed(layout), free_bytes(self._index) * self._share()
        short = self._group.all_gather(b"short" if need > free else b"", SYNC_S)
        if any(short):
            return {"skipped": f"needs {need / 2**30:.1f} GiB of memory on each rank"}
        with MoeComm(
            self._cfg, self._group, self._options.transport, self._device, self._options.kernels
        ) as comm:
            faults, inputs, exchange = self._check(comm)
            if any(self._group.all_gather("; ".join(faults).encode(), SYNC_S)):
                return {"faults": faults}
            record: Record = {}
            if not self._options.check_only:
                record |= self._measure(exchange)
                record |= self._bounds(comm.layout, inputs, distributed)
            record["memory_bytes"] = comm.memory_bytes
            importlib.import_module("torch").cuda.synchronize()
            comm.check()
            self._group.barrier(SYNC_S)
        return record

    def _share(self) -> float:
        """Of a GPU's free memory, what this rank may take."""
        return 0.9 / self._uuids.count(self._uuids[self._group.rank])

    def _check(self, comm: MoeComm) -> tuple[list[str], Inputs, Exchange]:
        """Exchanges of several inputs against the oracle; what the last one used."""
        for number in range(CHECKED):
            inputs = make_inputs(
                self._cfg, self._case, self._group.size, self._options.seed + number, self._device
            )
            exchange = Exchange(comm, inputs)
            faults = check_exchange(exchange, inputs)
            if faults:
                break
        return faults, inputs, exchange

    def _measure(self, exchange: Exchange) -> Record:
        options = self._options
        self._group.barrier(SYNC_S)

        def chain() -> None:
            for _ in range(options.pairs):
                exchange.pair()

        graph = capture(chain)
        self._group.barrier(SYNC_S)
        samples = replay_us(graph, options.replays, options.pairs)
        self._group.barrier(SYNC_S)
        halves = self._halves(exchange)
        host = self._host(exchange)
        return {
            "pair_us_p50": percentile(samples, 50),
            "pair_us_p99": percentile(samples, 99),
            **halves,
            "host_us_p50": host,
        }

    def _halves(self, exchange: Exchange) -> Record:
        """Each half by events in a graph, after pairs that bring the ranks together."""
        torch = importlib.import_module("torch")
        marks = Marks(self._index, 6)

        def marked() -> None:
            for _ in range(3):
                exchange.pair()
            exchange.pair(marks.record)
            marks.record(5)
            exchange.pair()

        graph = capture(marked)
        self._group.barrier(SYNC_S)
        spans: list[list[float]] = []
        for _ in range(MARKED_REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
            spans.append([marks.us(n, n + 1) for n in range(5)])
        marks.close()
        self._group.barrier(SYNC_S)
        return {
            "dispatch_us_p50": percentile([s[0] + s[1] for s in spans], 50),
            "combine_us_p50": percentile([s[2] + s[3] for s in spans], 50),
            "halves_us_p50": {
                half: percentile([s[n] for s in spans], 50) for n, half in enumerate(HALVES)
            },
            "event_us_p50": percentile([s[4] for s in spans], 50),  # what marking adds to each
        }

    def _host(self, exchange: Exchange) -> dict[str, float]:
        """Eager calls: how long each keeps the caller."""
        torch = importlib.import_module("torch")
        clock = HostClock()
        for number in range(HOST_PAIRS):
            exchange.timed_pair(clock)
            if number % 20 == 19:  # else the driver's queue fills and the host waits for the GPU
                torch.cuda.synchronize()
        return {half: percentile(us, 50) for half, us in clock.us.items()}

    def _bounds(self, layout: Layout, inputs: Inputs, distributed: Any) -> Record:
        """What no pair can beat, and NCCL with the same bytes: one row per token and rank, to each
        rank as many as the routing says."""
        cfg = self._cfg
        rows = rows_to_ranks(layout, inputs.idx)
        wire = cfg.hidden * itemsize(cfg.dispatch_dtype) + 4 * cfg.num_scales
        back = cfg.hidden * itemsize(cfg.combine_dtype)
        busiest = busiest_rows(rows, self._uuids)
        record: Record = {
            "bound_us": self._link.bound_us(busiest * wire, busiest * back),
            "nccl_us_p50": None,
        }
        if distributed is not None:
            record["nccl_us_p50"] = nccl.pair_us(distributed, self._group, rows, wire, back)
        return record


def check_exchange(exchange: Exchange, inputs: Inputs) -> list[str]:
    """One exchange, compared bit for bit; leaves ``y`` for the next."""
    oracle = Oracle(exchange.comm.layout, inputs)
    handle = exchange.dispatch_send()
    recv: Received = exchange.comm.dispatch_recv(handle)
    faults = oracle.faults(recv)
    exchange.y = oracle.expert_outputs(recv)
    exchange.comm.combine_send(exchange.y, handle)
    out = exchange.combine_recv(handle)
    if differs(out, oracle.output()):
        faults.append(f"rank {exchange.comm.group.rank}: out differs")
    return faults


def first_exchange(comm: MoeComm, case: Case, seed: int) -> tuple[Exchange, list[str]]:
    """This rank's part of a case on its GPU, which becomes the current one; and its faults."""
    assert comm.device != "cpu"
    index = comm.device[1]
    importlib.import_module("torch").cuda.set_device(index)
    inputs = make_inputs(comm.config, case, comm.group.size, seed, f"cuda:{index}")
    exchange = Exchange(comm, inputs)
    return exchange, check_exchange(exchange, inputs)


def right_exchange(comm: MoeComm, case: Case, seed: int) -> Exchange:
    """The same, where nothing was wrong.

    Raises:
        RuntimeError: something was, on any rank; on all of them.
    """
    exchange, faults = first_exchange(comm, case, seed)
    if any(comm.group.all_gather("; ".join(faults).encode(), SYNC_S)):
        raise RuntimeError(f"wrong results: {faults}")
    return exchange


def _bytes_needed(layout: Layout) -> int:
    """The communicator, ``y``, and the oracle's tensors, generously."""
    cfg = layout.cfg
    y = layout.recv_rows * cfg.hidden * itemsize(cfg.combine_dtype)
    tokens = layout.num_ranks * cfg.max_tokens
    used = tokens * (1 if cfg.layout == "rank" else min(cfg.top_k, layout.num_local_experts))
    working = 4 * cfg.hidden * (6 * tokens + 6 * used)
    return layout.symmetric.nbytes + layout.local.nbytes + y + working


def _say(group: Group, text: str) -> None:
    logger.info("rank %d: %s", group.rank, text)
    if group.rank == 0:
        sys.stderr.write(f"- {text}\n")
        sys.stderr.flush()
