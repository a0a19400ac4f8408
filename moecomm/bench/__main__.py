"""``python -m moecomm.bench FIELD=VALUE ...``: ``moecomm bench`` for scripts, without typer.

Fields are those of ``Options``; lists are separated by commas. ``json=FILE`` is where environment
and results go. Exit code 1 when a result is wrong, or no time was left for a case.

    python -m moecomm.bench json=found.json ranks=8 tokens=1,128 layouts=grouped,rank nccl=no
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from moecomm.bench.options import Options
from moecomm.bench.session import failed, run_bench
from moecomm.bench.table import table
from moecomm.errors import ConfigError, TransportUnavailable

_SWITCH: Final = {"yes": True, "no": False}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


_READ: Final[dict[str, Callable[[str], Any]]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "str": str,
    "bool": lambda text: _SWITCH[text],
    "tuple[int, ...]": _numbers,
    "tuple[str, ...]": _words,
}


def parse(arguments: Sequence[str]) -> tuple[Options, Path | None]:
    """Options, and the file for the results.

    Raises:
        ConfigError: no such field, or its value cannot be read or breaks a rule.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(Options)}
    found: dict[str, Any] = {}
    target = None
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name == "json" and text:
            target = Path(text)
            continue
        if not equals or name not in types:
            raise ConfigError(f"{argument!r}: must be FIELD=VALUE, FIELD one of {', '.join(types)}")
        try:
            found[name] = _READ[types[name]](text)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{name}={text}: must be {types[name]}") from error
    return Options(**found), target


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("moecomm.bench").setLevel(logging.INFO)
    try:
        options, target = parse(sys.argv[1:])
        found = run_bench(options)
    except (ConfigError, TransportUnavailable) as error:  # nothing that a traceback would explain
        sys.exit(f"{type(error).__name__}: {error}")
    if target is not None:
        target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(table(found["results"]) + "\n")
    wrong = failed(found["results"])
    for line in wrong:
        sys.stderr.write(line + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
