"""The demo's report: rich tables that a person likes to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moecomm.demo.session import PHASES, Result
from moecomm.demo.traffic import crossing
from moecomm.layout import Layout

BAR_CELLS: Final = 16
_LEFT: Final[dict[str, Any]] = {"title_justify": "left", "title_style": "bold"}


def print_report(result: Result, console: Console) -> None:
    """Everything, the verdict last."""
    console.print(_headline(result))
    console.print(_wire(result))
    console.print(_load(result, ascii_only=console.options.ascii_only))
    console.print(_times(result))
    console.print(_verdict(result))


def _headline(result: Result) -> RenderableType:
    options, cfg, ids = result.options, result.problem.cfg, result.problem.ids
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(result):
        facts.add_row(name, value)
    title = (
        f"[bold]{result.source}[/bold]: {len(ids):,} tokens "
        f"({len(np.unique(ids)):,} distinct), {options.ranks} ranks, "
        f"{cfg.num_experts} experts"
    )
    return Panel(facts, title=title, title_align="left", expand=False)


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    options, cfg = result.options, result.problem.cfg
    scales = f", a scale per {cfg.scale_block} columns" if cfg.scale_block else ""
    yield "layer", f"top-{cfg.top_k} softmax router, SwiGLU experts {cfg.hidden} x {options.inner}"
    yield "dispatch", f"{cfg.dispatch_dtype}{scales}; {cfg.layout} layout"
    yield "combine", f"{cfg.combine_dtype}, summed in float32; reduced at the {cfg.reduce}"
    yield "steps", f"{result.problem.num_steps} of at most {cfg.max_tokens} tokens a rank"
    if result.device == "cpu":
        yield "device", "CPU: a process per rank, running the CUDA C++ kernels in the emulator"
    else:
        yield "device", "GPU: a process per rank; dispatch and combine there, experts in numpy"


def _wire(result: Result) -> RenderableType:
    ranks = range(result.options.ranks)
    sent = [np.add(rank.dispatch_bytes, rank.combine_bytes) for rank in result.ranks]
    table = Table(title="KiB on the wire to each peer, dispatch and combine", **_LEFT)
    table.add_column("from")
    for peer in ranks:
        table.add_column(f"to {peer}", justify="right")
    table.add_column("all peers", justify="right")
    for rank in ranks:
        cells = ["-" if rank == peer else f"{sent[rank][peer] / 1024:,.1f}" for peer in ranks]
        total = sum(int(sent[rank][peer]) for peer in ranks if peer != rank)
        table.add_row(f"rank {rank}", *cells, f"{total / 1024:,.1f}")
    return Group(table, _comparison(result))


def _comparison(result: Result) -> RenderableType:
    """Dispatch with one copy per rank against one per (token, expert)."""
    row = Layout(result.problem.cfg, result.options.ranks, 0).record_bytes
    shared = crossing(result.traffic.per_rank) * row
    single = crossing(result.traffic.per_expert) * row
    if not single:
        return Text("Nothing crosses to a peer.\n")
    return Text.assemble(
        "Dispatch sends one copy per (token, rank): ",
        (_size(shared), "bold green"),
        ". A copy per (token, expert) would cost ",
        (_size(single), "bold red"),
        f", {single / shared:.2f} times as much.\n",
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:.1f} KiB"


def _load(result: Result, *, ascii_only: bool) -> RenderableType:
    """A small table of bars per rank, side by side as far as the terminal is wide."""
    load, cfg = result.traffic.load, result.problem.cfg
    most = max(1, int(load.max()))
    layout = Layout(cfg, result.options.ranks, 0)
    tables = []
    for rank in range(result.options.ranks):
        hosted = layout.expert_range(rank)
        total = int(load[hosted.start : hosted.stop].sum())
        table = Table(title=f"rank {rank}: {total:,} rows", box=None, show_header=False, **_LEFT)
        table.add_column(justify="right", style="dim")
        table.add_column(width=BAR_CELLS)
        table.add_column(justify="right")
        for expert in hosted:
            count = int(load[expert])
            table.add_row(str(expert), _bar(count / most, ascii_only=ascii_only), f"{count:,}")
        tables.append(table)
    even = load.sum() / cfg.num_experts
    title = Text.assemble(
        ("Tokens of each expert", "bold"),
        f" (mean {even:.1f}, most {most}: {most / even:.1f} times)",
    )
    return Group(title, Columns(tables, padding=(0, 3)), Text())


def _bar(share: float, *, ascii_only: bool) -> Text:
    """A bar of ``BAR_CELLS`` at most, in eighths of a cell where the terminal can."""
    eighths = round(share * BAR_CELLS * 8)
    if share > 0:
        eighths = max(1, eighths)
    if ascii_only:
        return Text("#" * -(-eighths // 8), style="cyan")
    full, rest = divmod(eighths, 8)
    return Text("█" * full + " ▏▎▍▌▋▊▉"[rest].strip(), style="cyan")


def _times(result: Result) -> RenderableType:
    table = Table(title="Time (ms, all steps together)", **_LEFT)
    table.add_column("phase")
    table.add_column("mean of ranks", justify="right")
    table.add_column("slowest rank", justify="right")
    for phase in PHASES:
        mean, slowest = result.seconds(phase)
        table.add_row(phase, f"{mean * 1e3:,.1f}", f"{slowest * 1e3:,.1f}")
    table.add_section()
    table.add_row("unsharded layer, numpy", "", f"{result.plain_s * 1e3:,.1f}")
    table.add_row("sharded, start to end", "", f"{result.sharded_s * 1e3:,.1f}")
    if result.device != "cpu":
        return table
    note = Text("The emulator finds wrong kernels; its times say nothing about a GPU.\n", "dim")
    return Group(table, note)


def _verdict(result: Result) -> RenderableType:
    faults = result.faults
    if faults:
        lines = "\n".join(f"- {fault}" for fault in faults)
        return Panel(lines, title="FAILED", border_style="bold red", expand=False)
    text = (
        "The sharded layer gives the unsharded layer's output.\n"
        f"Largest error {result.max_error:.2g} on outputs up to {result.max_output:.2g}: "
        f"{result.worst_share:.0%} of what rounding to {result.problem.cfg.combine_dtype} allows."
    )
    return Panel(text, title="PASSED", border_style="bold green", expand=False)
