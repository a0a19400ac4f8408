"""``moecomm compile``: every kernel to a cubin, with what the compiler reports about each."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moecomm import cpus, dtypes
from moecomm.doctor.finding import size_text
from moecomm.kernels import choice
from moecomm.kernels.jit import DEFAULT_ARCHS, Compiled, Toolchain
from moecomm.kernels.jit.batch import Outcome, Task, compile_all
from moecomm.kernels.stages import Variant, variants


def compile_kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="GPU architecture, such as sm_90a; may be repeated.", show_default=False),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes that compile; 0: one for each CPU.")
    ] = 0,
    kernels: Annotated[
        str, typer.Option(help="auto, cuda, numba, or the path of kernels in Python.")
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table as JSON on stdout.")
    ] = False,
) -> None:
    """Compile kernels that cover every dtype, layout and option; no GPU is needed.

    Without **--arch**: sm_80, sm_90 and sm_100. Cubins go to the kernel cache. Exit code 1 when a
    kernel does not compile or spills registers.
    """
    archs = list(dict.fromkeys(arch or DEFAULT_ARCHS))
    toolchain = Toolchain.load()
    for name in archs:
        toolchain.check_arch(name)
    tasks = [task for name in archs for task in _tasks(kernels, name)]
    outcomes = _with_progress(tasks, jobs or len(cpus.allowed()))
    if as_json:
        typer.echo(json.dumps([row for o in outcomes for row in rows(o)], indent=2))
    else:
        show(outcomes, Console())
    if failed(outcomes):
        raise typer.Exit(1)


def failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a kernel did not compile, or spills registers."""
    return any(
        outcome.compiled is None or any(r.spills for r in outcome.compiled.resources.values())
        for outcome in outcomes
    )


def _tasks(kernels: str, arch: str) -> list[Task]:
    if choice.choose(kernels) is None:
        return [_task(variant, arch) for variant in variants()]
    from moecomm.kernels.numba_jit import gpu

    name = choice.named(kernels)
    return [
        _task(v, arch, functools.partial(gpu.compile_variant, name, v, arch))
        for v in gpu.variants()
    ]


def _task(variant: Variant, arch: str, make: Callable[[], Compiled] | None = None) -> Task:
    detail = ""
    if variant.stage == "dispatch_send":
        names = {entry.code: entry.name for entry in dtypes.DTYPES.values()}
        detail = f"from {names[variant.input_code]}"
    source = variant.source if make is None else f"{variant.stage} in Python"
    return Task(variant.label, detail, source, variant.defines, arch, make)


def _with_progress(tasks: list[Task], jobs: int) -> list[Outcome]:
    """Compile with a bar on stderr; outcomes in the order of ``tasks``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("compiling", total=len(tasks))
        for outcome in compile_all(tasks, jobs):
            outcomes.append(outcome)
            description = f"{outcome.task.source} {outcome.task.arch}"
            progress.update(bar, advance=1, description=description)
    places = {_identity(task): place for place, task in enumerate(tasks)}
    return sorted(outcomes, key=lambda outcome: places[_identity(outcome.task)])


def _identity(task: Task) -> tuple[str, ...]:
    return task.label, task.detail, task.source, task.arch


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one dictionary of plain values per kernel; ``error`` instead where there is none."""
    task, compiled = outcome.task, outcome.compiled
    head = {
        "source": task.source,
        "variant": task.label,
        "detail": task.detail,
        "arch": task.arch,
    }
    if compiled is None:
        return [{**head, "error": str(outcome.error)}]
    tail = {
        "cubin": str(compiled.path),
        "cubin_bytes": compiled.nbytes,
        "seconds": round(compiled.seconds, 4),
        "cached": compiled.cached,
    }
    return [
        {**head, "kernel": kernel, **dataclasses.asdict(compiled.resources[kernel]), **tail}
        for kernel in compiled.kernels
    ]


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print the table, then errors, then one line of totals."""
    console.print(_table(outcomes))
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(Text(str(outcome.error), "red"))
    done = [outcome.compiled for outcome in outcomes if outcome.compiled is not None]
    spilling = [k for c in done for k, r in c.resources.items() if r.spills]
    text = (
        f"{len(done)} cubins, {size_text(sum(c.nbytes for c in done))}, "
        f"{sum(c.cached for c in done)} from the cache; {len(spilling)} kernels spill registers, "
        f"{len(outcomes) - len(done)} do not compile."
    )
    console.print(Text(text, "red" if failed(outcomes) else "green"))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Kernel")
    for name in ("Regs", "Stack", "Spills", "Shared", "KiB", "Seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    heading = ""
    for outcome in outcomes:
        title = f"{outcome.task.arch}, {outcome.task.label}"
        if title != heading:
            heading = title
            table.add_row(Text(title, "bold"))
        for row in rows(outcome):
            table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[Text]:
    detail = f", {row['detail']}" if row["detail"] else ""
    name = Text(f"  {row.get('kernel', row['source'])}{detail}")
    if "error" in row:
        return [name, Text("fails", "bold red")]
    spills = row["spill_store_bytes"] + row["spill_load_bytes"]
    return [
        name,
        Text(str(row["registers"])),
        Text(str(row["stack_bytes"]), "yellow" if row["stack_bytes"] else ""),
        Text(str(spills), "bold red" if spills else ""),
        Text(str(row["shared_bytes"])),
        Text(f"{row['cubin_bytes'] / 1024:.0f}"),
        Text("cached" if row["cached"] else f"{row['seconds']:.2f}"),
    ]
