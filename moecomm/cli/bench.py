"""``moecomm bench``: options of the benchmark, its table, its files and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moecomm.errors import ConfigError


def bench(
    ranks: Annotated[int, typer.Option(min=1, help="Processes, in turn over the GPUs.")] = 2,
    tokens: Annotated[
        str, typer.Option(help="Tokens per rank; several, separated by commas.")
    ] = "1,8,64,128,512,4096",
    layout: Annotated[str, typer.Option(help="batched, grouped, rank; several.")] = "rank",
    dtype: Annotated[
        str, typer.Option(help="What travels to the experts; several.")
    ] = "float8_e4m3fn",
    input_dtype: Annotated[
        str, typer.Option(help="For fp8: what dispatch is given, and casts; several.")
    ] = "bfloat16",
    routing: Annotated[str, typer.Option(help="uniform, zipf; several.")] = "uniform",
    experts: Annotated[int, typer.Option(help="Experts over all ranks.")] = 256,
    top_k: Annotated[int, typer.Option(help="Experts of one token.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of a token's row.")] = 7168,
    reduce: Annotated[
        str, typer.Option(help="receiver or sender: where weights are applied.")
    ] = "receiver",
    wire: Annotated[str, typer.Option(help="auto, lines or flags.")] = "auto",
    alignment: Annotated[int, typer.Option(help="Of each expert's first row (grouped).")] = 1,
    num_sms: Annotated[
        int | None, typer.Option(help="Multiprocessors a kernel may use.", show_default="all")
    ] = None,
    transport: Annotated[str, typer.Option(help="How ranks reach each other.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, cuda, numba, or a path.")] = "auto",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs in one graph.")] = 20,
    replays: Annotated[int, typer.Option(min=1, help="Timed replays of it.")] = 200,
    nccl: Annotated[bool, typer.Option(help="Time NCCL's all-to-all, too.")] = True,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Compare results; time nothing.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Skip cases that would begin later, in seconds.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write environment and results here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw pair times here (PNG; needs moecomm[plot]).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for everything.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Fixes routing and rows.")] = 1,
) -> None:
    """Time dispatch and combine on this machine's GPUs; check them first, bit by bit.

    Each case is checked against an oracle, then timed: pairs of dispatch and combine chained in a
    replayed CUDA graph, each half by events inside a graph, and what a call costs the host. The
    same run measures NCCL with the same bytes, and a lower bound from the links' speed. Times are
    microseconds, of the worst rank. Exit code 1 when a result is wrong, or no time was left for a
    case.
    """
    from moecomm.bench.options import Options
    from moecomm.bench.session import failed, run_bench
    from moecomm.bench.table import plot as draw
    from moecomm.bench.table import plotting, table

    if plot is not None:
        plotting(plot)  # rather than fail when all is measured
    options = Options(
        ranks=ranks,
        tokens=tuple(_number("tokens", part) for part in _parts(tokens)),
        layouts=_parts(layout),
        dispatch_dtypes=_parts(dtype),
        input_dtypes=_parts(input_dtype),
        routings=_parts(routing),
        num_experts=experts,
        top_k=top_k,
        hidden=hidden,
        reduce=reduce,
        wire=wire,
        expert_alignment=alignment,
        num_sms=num_sms,
        transport=transport,
        kernels=kernels,
        pairs=pairs,
        replays=replays,
        nccl=nccl,
        check_only=check_only,
        budget_s=budget,
        timeout_s=timeout,
        seed=seed,
    )
    found = run_bench(options)
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    typer.echo(table(found["results"]))
    if plot is not None:
        draw(found["results"], plot)
    if failed(found["results"]):
        raise typer.Exit(1)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{name}: {text!r} must be a whole number")
    return int(text)
