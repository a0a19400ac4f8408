"""Progress for commands: what is going on now, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A function that announces the next stage, on stderr.

    On a terminal one line with a spinner and a clock, gone at the end; else a line per stage.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"- {text}", highlight=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text: progress.update(task, description=text)
