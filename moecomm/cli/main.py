"""The ``moecomm`` command: a table of subcommands, each imported when it is called."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from moecomm.errors import MoecommError

DEBUG_FLAG: Final = "--debug"


class _Entry(NamedTuple):
    """A subcommand: ``module.function`` has its options, ``summary`` is its line of help."""

    module: str
    function: str
    summary: str


_COMMANDS: Final = {
    "demo": _Entry(
        "moecomm.cli.demo", "demo", "Run a real MoE layer over several ranks and check its output."
    ),
    "doctor": _Entry(
        "moecomm.cli.doctor", "doctor", "Say what is here, what is missing and how to get it."
    ),
    "compile": _Entry(
        "moecomm.cli.compile", "compile_kernels", "Compile every kernel; show registers and spills."
    ),
    "bench": _Entry(
        "moecomm.cli.bench", "bench", "Time dispatch and combine on this machine's GPUs."
    ),
    "bench-transfer": _Entry(
        "moecomm.cli.bench_transfer",
        "bench_transfer",
        "Time the transfer engine beside C, over libfabric on this machine.",
    ),
    "fuzz": _Entry(
        "moecomm.cli.fuzz", "fuzz", "Run the kernels in the emulator over many interleavings."
    ),
}


class _LazyGroup(TyperGroup):
    """Lists subcommands from the table, so that ``--help`` imports none of them.

    Contexts and commands are ``Any``: their classes are click's in older typers, typer's own in
    newer ones.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = _COMMANDS.get(cmd_name)
        return entry and TyperCommand(cmd_name, help=entry.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _COMMANDS:
            command = _load(name)
        return name, command, rest


def _load(name: str) -> Any:
    entry = _COMMANDS[name]
    function = getattr(importlib.import_module(entry.module), entry.function)
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(value: bool) -> None:
    if value:
        from moecomm import __version__

        typer.echo(f"moecomm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_FLAG, help="Show the whole traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Mixture-of-Experts dispatch and combine."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")


def main() -> None:
    """Entry point: an error of the package is one line on stderr and exit code 1.

    ``--debug`` counts wherever it stands on the command line.
    """
    debug = DEBUG_FLAG in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG_FLAG]
    try:
        app(arguments, prog_name="moecomm")
    except MoecommError as error:
        if debug:
            raise
        _print_error(error)
        sys.exit(1)


def _print_error(error: MoecommError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    line = Text.assemble((f"{type(error).__name__}: ", "bold red"), str(error))
    console.print(line, soft_wrap=True)
    console.print(Text(f"Add {DEBUG_FLAG} for the traceback.", "dim"))
