"""``moecomm fuzz``: random exchanges in the emulator, one interleaving per seed."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moecomm.cli.demo import DispatchDtype, LayoutOption, ReduceOption

if TYPE_CHECKING:
    from moecomm.errors import MoecommError
    from moecomm.fuzzing import Case, Limits


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 40,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks; without it, 1 to 5.", show_default=False)
    ] = None,
    layout: Annotated[
        LayoutOption | None, typer.Option(help="Without it, any.", show_default=False)
    ] = None,
    dtype: Annotated[
        DispatchDtype | None,
        typer.Option(help="Of dispatch; without it, bfloat16 or fp8.", show_default=False),
    ] = None,
    reduce: Annotated[
        ReduceOption | None, typer.Option(help="Without it, either.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a rank in a step.")] = 12,
    hidden: Annotated[int, typer.Option(min=1, help="Most columns of a token.")] = 96,
    steps: Annotated[int, typer.Option(min=1, help="Exchanges per seed.")] = 3,
    kernels: Annotated[
        str, typer.Option(help="auto, cuda, numba, or the path of kernels in Python.")
    ] = "auto",
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Not only to the first.")
    ] = False,
) -> None:
    """Run the kernels of all ranks in the emulator, and compare every bit with the reference.

    A seed chooses a random problem (uneven experts, dropped and repeated slots, ranks without
    tokens) and one unfair schedule of all threads of all ranks. The emulator also checks what each
    thread reads. Exit code 1 on a failure, which names its seed.
    """
    from moecomm.errors import MoecommError
    from moecomm.fuzzing import Limits, draw_case, run_case

    limits = Limits(
        ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        steps=steps,
        layout=layout.value if layout else None,
        reduce=reduce.value if reduce else None,
        dtype=dtype.value if dtype else None,
        kernels=kernels,
    )
    passed: Counter[str] = Counter()
    failures: list[tuple[Case, MoecommError]] = []
    start = time.perf_counter()
    with _progress() as progress:
        bar = progress.add_task("", total=seeds)
        for seed in range(first_seed, first_seed + seeds):
            case = draw_case(seed, limits)
            progress.update(bar, description=f"seed {seed}: {case.cfg.layout}")
            try:
                run_case(case)
                passed[case.cfg.layout] += 1
            except MoecommError as error:
                failures.append((case, error))
                if not keep_going:
                    break
            progress.advance(bar)
    console = Console()
    for case, failure in failures:
        _show_failure(case, failure, limits, console)
    _show_totals(passed, len(failures), time.perf_counter() - start, console)
    if failures:
        raise typer.Exit(1)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _show_failure(case: Case, error: MoecommError, limits: Limits, console: Console) -> None:
    console.print(Text.assemble((f"Seed {case.seed} failed", "bold red"), f" on {case}"))
    console.print(Text(f"{type(error).__name__}: {error}"), soft_wrap=True)
    options = [f"--{name} {value}" for name, value in limits.changed().items()]
    again = " ".join([f"moecomm fuzz --first-seed {case.seed} --seeds 1", *options])
    console.print(Text(f"Again: {again}", "dim"), soft_wrap=True)


def _show_totals(passed: Counter[str], failed: int, seconds: float, console: Console) -> None:
    layouts = ", ".join(f"{count} {layout}" for layout, count in sorted(passed.items()))
    agree = f"{passed.total()} seeds agree with the reference bit for bit"
    text = f"{agree}{f' ({layouts})' if layouts else ''}, {failed} failed; {seconds:.1f} s"
    console.print(Text(text, "red" if failed else "green"))
