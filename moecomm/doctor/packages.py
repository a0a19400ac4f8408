"""Python and the packages that moecomm uses: there, new enough, and able to live together."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from moecomm.doctor.finding import Finding, absent, bad, ok
from moecomm.kernels.jit.toolchain import INSTALL

TOPIC: Final = "Python"
MIN_PYTHON: Final = (3, 11)
# Needed by the CPU path, with the oldest version that is tested (see pyproject.toml).
REQUIRED: Final = {"numpy": (2, 0), "ml_dtypes": (0, 5), "numba": (0, 61)}
OPTIONAL: Final = {
    "torch": 'pip install "moecomm[torch]"',
    "cupy-cuda13x": INSTALL,
    "numba-cuda": INSTALL,
}
_ROW_STACK_GONE: Final = (2, 5)  # numpy that removed np.row_stack, which numba-cuda calls


@dataclass(frozen=True, slots=True)
class Packages:
    """Python's version and installed distribution → version."""

    python: tuple[int, ...]
    versions: Mapping[str, str]


def probe() -> Packages:
    """Ask Python and the metadata of installed packages; imports none of them."""
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    present = {name: version for name, version in versions.items() if version is not None}
    return Packages(tuple(sys.version_info[:3]), present)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def findings(packages: Packages) -> list[Finding]:
    found = [_python(packages.python)]
    found += [_required(name, packages.versions.get(name)) for name in REQUIRED]
    found += [_optional(name, packages.versions.get(name)) for name in OPTIONAL]
    return [*found, *_numba_cuda_clash(packages.versions)]


def _python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] >= MIN_PYTHON:
        return ok(TOPIC, "Python", text, required=True)
    least = ".".join(map(str, MIN_PYTHON))
    return bad(TOPIC, "Python", f"{text}, at least {least} is needed", required=True)


def _required(name: str, version: str | None) -> Finding:
    least = ".".join(map(str, REQUIRED[name]))
    fix = f'pip install "{name}>={least}"'
    if version is None:
        return absent(TOPIC, name, "not installed", fix, required=True)
    if release(version) < REQUIRED[name]:
        detail = f"{version}, at least {least} is needed"
        return bad(TOPIC, name, detail, fix, required=True)
    return ok(TOPIC, name, version, required=True)


def _optional(name: str, version: str | None) -> Finding:
    if version is None:
        return absent(TOPIC, name, "not installed", OPTIONAL[name])
    if name == "torch" and "+cpu" in version:
        return ok(TOPIC, name, f"{version}: built for CPUs only")
    return ok(TOPIC, name, version)


def _numba_cuda_clash(versions: Mapping[str, str]) -> list[Finding]:
    numpy, numba_cuda = versions.get("numpy"), versions.get("numba-cuda")
    if numpy is None or numba_cuda is None or release(numpy) < _ROW_STACK_GONE:
        return []
    detail = f"numba-cuda {numba_cuda} calls np.row_stack, which numpy {numpy} no longer has"
    return [bad(TOPIC, "numba-cuda with numpy", detail, 'pip install "numpy<2.5"')]


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version; (0, 0) where it does not start with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
