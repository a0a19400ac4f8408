"""What an exchange between nodes costs the GPU, and what runs beside it.

    python bench/network.py --ranks 2 --node-size 1 --tokens 1,32,128 [--out FILE.json]

For each number of tokens, per rank and on the GPU's own clock:

* ``kernels_us``: the sending and the receiving kernels of dispatch (of combine) when the bytes
  have come meanwhile: all that the exchange takes from the stream;
* ``alone_us``: both halves, one right after the other: the network's time is in it;
* ``compute_us`` and ``both_us``: matrix products that last longer than the exchange, alone and
  between the halves of dispatch. ``hidden`` is how much of the exchange's time disappears behind
  them; ``beside_us`` is such a step, one part after the other on the stream.

Ranks pretend to be on different machines; over tcp the time is that of this machine's kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moecomm as mc
from moecomm.bench.environment import environment
from moecomm.bench.options import Options
from moecomm.bench.timing import percentile
from moecomm.bench.worker import Exchange, first_exchange

ROUNDS = 60
PRODUCT = 4096  # a side of the matrices; 170 us on an H200
CYCLES_A_US = 2000  # at most, of the GPU


def main() -> None:
    parser = argparse.ArgumentParser(description="exchange between pretended nodes, on GPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--node-size", type=int, default=1)
    parser.add_argument("--tokens", default="1,32,128")
    parser.add_argument("--transport", default="efa")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["MOECOMM_NODE_SIZE"] = str(given.node_size)
    os.environ.setdefault("MOECOMM_FABRIC", "tcp")
    tokens = tuple(int(part) for part in given.tokens.split(","))
    options = Options(ranks=given.ranks, tokens=tokens, layouts=("rank",), wire="flags")
    reports = mc.run(
        measure, given.ranks, options, device="cuda", transport=given.transport, timeout_s=500
    )
    worst = [_worst(case) for case in zip(*reports, strict=True)]
    for case in worst:
        if "both_us" in case:
            added = case["both_us"] - case["compute_us"]
            case["hidden"] = 1 - added / case["alone_us"]["dispatch"]
    found = {"ranks": given.ranks, "node_size": given.node_size, "results": worst}
    text = json.dumps({"environment": environment(), **found}, indent=1)
    if given.out is not None:
        given.out.write_text(text)
    sys.stdout.write(text + "\n")


def measure(group: mc.Group, options: Options) -> list[dict[str, Any]]:
    """A record for each case."""
    found = []
    for case in options.cases():
        with mc.MoeComm(options.config(case), group) as comm:
            torch = importlib.import_module("torch")
            exchange, faults = first_exchange(comm, case, options.seed)
            record: dict[str, Any] = {
                "kind": "network", "tokens": case.num_tokens, "faults": faults,
            }  # fmt: skip
            if not any(group.all_gather("; ".join(faults).encode(), 60)):
                record |= _times(exchange)
            found.append(record)
            torch.cuda.synchronize()
            comm.check()
            group.barrier(60)
    return found


def _times(exchange: Exchange) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    comm = exchange.comm
    alone = alone_us(exchange)
    cycles = int(3 * max(alone.values()) * CYCLES_A_US)  # everything has come then
    waiting = _median(comm, exchange, lambda: torch.cuda._sleep(cycles))
    compute = products_of(1.2 * alone["dispatch"])
    compute_us = _once(torch, compute)
    both = _median(comm, exchange, compute)
    return {
        "kernels_us": {
            "dispatch": waiting["dispatch_send"] + waiting["dispatch_recv"],
            "combine": waiting["combine_send"] + waiting["combine_recv"],
        },
        "halves_us": {k: v for k, v in waiting.items() if "_" in k},
        "alone_us": alone,
        "compute_us": compute_us,
        "both_us": both["dispatch"],
        "beside_us": {k: both[k] for k in ("dispatch_send", "between", "dispatch_recv")},
    }


def alone_us(exchange: Exchange) -> dict[str, float]:
    """Both halves of dispatch, and of combine, one right after the other; the slowest rank's."""
    group = exchange.comm.group
    mine = _median(exchange.comm, exchange, lambda: None)

    def slowest(name: str) -> float:
        return max(float(blob) for blob in group.all_gather(str(mine[name]).encode(), 60))

    return {name: slowest(name) for name in ("dispatch", "combine")}


def products_of(us: float) -> Callable[[], None]:
    """Matrix products that take at least so long."""
    torch = importlib.import_module("torch")
    a = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=out)
    count = int(us / _once(torch, lambda: torch.mm(a, a, out=out))) + 1

    def work() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return work


def _median(comm: mc.MoeComm, exchange: Exchange, between: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each half, and of both with ``between`` in between."""
    torch = importlib.import_module("torch")
    samples: dict[str, list[float]] = {}
    for number in range(ROUNDS + 5):
        comm.group.barrier(60)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        torch.cuda._sleep(2_000_000)  # launches are ahead of the GPU from here on
        marks[0].record()
        handle = exchange.dispatch_send()
        marks[1].record()
        between()
        marks[2].record()
        comm.dispatch_recv(handle)
        marks[3].record()
        marks[4].record()
        comm.combine_send(exchange.y, handle)
        marks[5].record()
        between()
        marks[6].record()
        exchange.combine_recv(handle)
        marks[7].record()
        torch.cuda.synchronize()
        if number < 5:
            continue
        spans = {
            "dispatch_send": (0, 1), "between": (1, 2), "dispatch_recv": (2, 3), "dispatch": (0, 3),
            "combine_send": (4, 5), "combine_recv": (6, 7), "combine": (4, 7),
        }  # fmt: skip
        for name, (begin, end) in spans.items():
            samples.setdefault(name, []).append(marks[begin].elapsed_time(marks[end]) * 1e3)
    return {name: percentile(values, 50) for name, values in samples.items()}


def _once(torch: Any, work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _worst(records: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Of every figure the slowest rank's."""
    merged: dict[str, Any] = {}
    for key, first in records[0].items():
        values = [record[key] for record in records if key in record]
        if isinstance(first, dict):
            merged[key] = _worst(tuple(values))
        elif isinstance(first, list):
            merged[key] = [item for value in values for item in value]
        elif isinstance(first, str):
            merged[key] = first
        else:
            merged[key] = max(values)
    return merged


if __name__ == "__main__":
    main()
