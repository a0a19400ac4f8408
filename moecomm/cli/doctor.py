"""``moecomm doctor``: the report as tables or JSON, and its exit code."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moecomm.cli.progress import stages
from moecomm.doctor import Finding, Report, State, Verdict, examine

_STYLES: Final = {State.ok: "green", State.absent: "yellow", State.bad: "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout.")
    ] = False,
) -> None:
    """Say what is here, what is missing, and the one command that helps.

    Exit code 0 when kernels can run in the CPU emulator, whatever else is missing; else 1.
    """
    with stages() as stage:
        report = examine(stage)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console())
    if not report.cpu_works:
        raise typer.Exit(1)


def show(report: Report, console: Console) -> None:
    """Print what was found, then the transports, then the conclusion."""
    console.print(_findings(report.findings))
    console.print(_transports(report.transports))
    if report.cpu_works:
        console.print(Text("The CPU path works.", "green"))
        return
    culprits = ", ".join(finding.name for finding in report.findings if finding.fatal)
    console.print(Text(f"The CPU path does not work: {culprits}.", "bold red"))


def _findings(findings: tuple[Finding, ...]) -> Table:
    """A line per finding; what to do stands below it, so that a command can be copied."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("What", no_wrap=True)
    table.add_column("Found", overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row("", Text(topic, "bold"))
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(state, f"  {finding.name}", Text(finding.detail))
        if finding.fix:
            table.add_row("", "", Text(f"→ {finding.fix}", "cyan"))
    return table


def _transports(verdicts: tuple[Verdict, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Transport", no_wrap=True)
    table.add_column("Usable", no_wrap=True)
    table.add_column("Why", overflow="fold")
    for verdict in verdicts:
        usable = Text("yes", "green") if verdict.usable else Text("no", "yellow")
        table.add_row(verdict.name, usable, Text(verdict.why))
    return table
