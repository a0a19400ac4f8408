"""Device sources: found in the package, bundled into one text for NVRTC or for a C++ compiler."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from moecomm.errors import ConfigError

_INCLUDE: Final = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_PRAGMA_ONCE: Final = re.compile(r"^\s*#\s*pragma\s+once\b")
_CONDITIONAL: Final = re.compile(r"^\s*#\s*(else|elif|endif)\b")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@functools.cache
def names() -> tuple[str, ...]:
    """Return the file names of all device sources and headers, sorted."""
    return tuple(sorted(_places()))


@functools.cache
def _places() -> dict[str, Traversable]:
    """Name → file. The kernels in Python have one header beside them."""
    folders = [resources.files("moecomm.kernels") / name for name in ("cuda", "numba")]
    files = [file for folder in folders for file in folder.iterdir()]
    return {file.name: file for file in files if file.name.endswith((".cu", ".cuh"))}


@functools.cache
def load(name: str) -> str:
    """Return the text of one device source or header.

    Raises:
        ConfigError: there is no such file in the package.
    """
    if name not in names():
        raise ConfigError(f"name={name!r}: must be one of {', '.join(names())}")
    return _places()[name].read_text(encoding="utf-8")


def bundle(name: str, defines: Mapping[str, int | str]) -> str:
    """Return source ``name`` as one text: ``defines`` first, then the file, includes inlined.

    ``#line`` directives make compilers name the original file and line. Quoted includes of files
    beside ``name`` are inlined; any other include is left to the compiler.

    Raises:
        ConfigError: there is no such source, or a define is not a macro name and a one-line value.
    """
    lines = [f'#line 1 "defines of {name}"']
    lines += [f"#define {key} {_literal(key, defines[key])}" for key in sorted(defines)]
    lines += _inline(name, ())
    return "\n".join(lines) + "\n"


def _inline(name: str, parents: tuple[str, ...]) -> list[str]:
    """Lines of ``name`` between ``#line`` marks.

    Every include is inlined again where it stands, inside a guard where the file says
    ``#pragma once``: dropping repeats here would be wrong if the first one is inside a false
    ``#if``. The pragma itself goes, because compilers warn about it in a main file.
    """
    body: list[str] = []
    guarded = shifted = False
    for number, line in enumerate(load(name).splitlines(), start=1):
        include = _INCLUDE.match(line)
        if _PRAGMA_ONCE.match(line):
            guarded = True
            body.append("")
        elif include is None or include[1] not in names():
            body.append(line)
            if shifted and _CONDITIONAL.match(line):  # marks inside a false #if did not count
                body.append(f'#line {number + 1} "{name}"')
        elif include[1] in (*parents, name):
            body.append("")  # a cycle: being inside that file, its guard is already set
        else:
            body += _inline(include[1], (*parents, name))
            body.append(f'#line {number + 1} "{name}"')
            shifted = True
    if not guarded:
        return [f'#line 1 "{name}"', *body]
    macro = "MOECOMM_INCLUDED_" + re.sub(r"\W", "_", name)
    return [f"#ifndef {macro}", f"#define {macro}", f'#line 1 "{name}"', *body, "#endif"]


def _literal(key: str, value: int | str) -> str:
    if not _IDENTIFIER.fullmatch(key):
        raise ConfigError(f"defines[{key!r}]: a macro name is letters, digits and _")
    if isinstance(value, str):
        if "\n" in value or "\r" in value:
            raise ConfigError(f"defines[{key!r}]={value!r}: must be one line")
        return value
    if value < 0:
        return f"({int(value)})"
    return f"{int(value)}ull" if value >= 2**63 else str(int(value))
