"""A whole run: a process per rank, their figures made one table, and what machine it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from moecomm import env
from moecomm.bench.environment import environment
from moecomm.bench.options import Case, Options
from moecomm.bench.prepare import compile_ahead, layouts, remote
from moecomm.bench.worker import NO_TIME, bench_rank
from moecomm.kernels import choice
from moecomm.layout import Layout
from moecomm.run import run

Record = dict[str, Any]


def run_bench(options: Options) -> dict[str, Any]:
    """``{"environment": {...}, "results": [{...}, ...]}``, plain values.

    Raises: what a rank raises; ``TransportUnavailable`` where there is no GPU.
    """
    machine = environment()
    compile_ahead(layouts(options), options.kernels)
    reports = run(
        bench_rank,
        options.ranks,
        options,
        device="cuda",
        transport=options.transport,
        timeout_s=options.timeout_s,
    )
    machine["link"] = reports[0]["link"]
    machine["options"] = dataclasses.asdict(options)
    return {"environment": machine, "results": list(results_of(reports, options))}


def failed(results: list[Record]) -> list[str]:
    """What a run must not end with: wrong results, and cases for which no time was left."""
    found = []
    for result in results:
        name = " ".join(str(result[key]) for key in ("layout", "num_tokens", "routing"))
        if result["correct"] is False:
            found.append(f"{name}: wrong: {'; '.join(result['faults'])}")
        elif result.get("skipped") == NO_TIME:
            found.append(f"{name}: {NO_TIME}")
    return found


def results_of(reports: list[dict[str, Any]], options: Options) -> Iterator[Record]:
    """One result per case: of every figure the worst rank's."""
    for number, case in enumerate(options.cases()):
        records = [report["records"][number] for report in reports]
        head = {
            "transport": "nvlink" if options.transport == "auto" else options.transport,
            "kernels": choice.named(options.kernels),
            **dataclasses.asdict(case),
            "world_size": options.ranks,
            "num_gpus": len(set(reports[0]["uuids"])),
            "reduce": options.config(case).reduce,
            "combine_dtype": options.combine_dtype,
            "hidden": options.hidden,
            "top_k": options.top_k,
            "num_experts": options.num_experts,
            "wire": "lines" if _has_lines(options, case) else "flags",
        }
        found = _worst(records)
        yield head | {"correct": None if "skipped" in found else not found.get("faults")} | found


def _has_lines(options: Options, case: Case) -> bool:
    puts = options.transport == "nvshmem" and env.flag("NVSHMEM_NO_POINTERS")
    return not puts and Layout(options.config(case), options.ranks, 0, remote(options)).lines


def _worst(records: list[Record]) -> Record:
    merged: Record = {}
    for key in dict.fromkeys(key for record in records for key in record):
        values = [record[key] for record in records if record.get(key) is not None]
        if not values:
            merged[key] = None
        elif isinstance(values[0], dict):
            merged[key] = _worst(values)
        elif isinstance(values[0], list):
            merged[key] = [item for value in values for item in value]
        else:
            merged[key] = max(values)
    return merged
