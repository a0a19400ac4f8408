"""``moecomm bench-transfer``: the transfer engine, and movers on it, beside C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

_HOT: Final = (
    "moecomm.transport.engine.loop", "moecomm.transport.engine.ring", "moecomm.transport.efa.hot",
    "moecomm.bench.transfer_programs", "moecomm.transport.proxy.program",
)  # fmt: skip


def bench_transfer(
    fabrics: Annotated[str, typer.Option(help="libfabric's; several, with commas.")] = "shm,tcp",
    repeats: Annotated[int, typer.Option(min=2, help="Of each side, in turn.")] = 25,
    posts: Annotated[int, typer.Option(min=800, help="Writes in one repeat.")] = 20_000,
    peers: Annotated[int, typer.Option(min=1, max=60, help="Of the scatter.")] = 15,
    spin: Annotated[
        int, typer.Option(min=0, help="Idle polls before giving up the processor.")
    ] = 2000,
    parts: Annotated[
        str, typer.Option(help="engine: its calls; bulk: movers of 4 ranks, each a node.")
    ] = "engine,bulk",
    output: Annotated[
        Path | None, typer.Option("--json", help="Write environment and results here.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for everything.")] = 600.0,
) -> None:
    """Time the transfer engine beside C code that makes the same calls of libfabric.

    Posting, half a round trip, long writes and scatter, on this machine alone; both sides in turn,
    the best of each. Then what movers of 4 ranks take for the bytes of 128 tokens, beside C that
    writes them at once; medians. Needs a C++ compiler. With `--spin 0` both sides of the engine's
    calls give up the processor at once: for machines whose cores are shared.
    """
    from moecomm.bench.transfer_table import table
    from moecomm.transport.engine import jit

    jit.load(*_HOT)  # before any rank waits for another
    from moecomm.bench.transfer import TransferOptions, run_transfer_bench

    found = run_transfer_bench(
        TransferOptions(
            fabrics=_listed(fabrics),
            repeats=repeats,
            posts=posts,
            peers=peers,
            parts=_listed(parts),
            spin=spin,
            timeout_s=timeout,
        )
    )
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    typer.echo(table(found["results"]))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
