"""Copies of libfabric and the providers that each can open here."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moecomm.doctor import foreign
from moecomm.doctor.finding import Finding, absent, bad, ok
from moecomm.doctor.foreign import Failure

TOPIC: Final = "libfabric"
INSTALL: Final = 'pip install "moecomm[efa]"'
# AWS's own build, the mpich wheel's (2.5, has efa), the system's (Debian's 1.17 has no efa).
CANDIDATES: Final = (
    "/opt/amazon/efa/lib/libfabric.so.1",
    "/opt/amazon/efa/lib64/libfabric.so.1",
    f"{sys.prefix}/lib/mpich/libfabric.so.1",
    "libfabric.so.1",
)
_NEWEST_API: Final = (1, 22)


@dataclass(frozen=True, slots=True)
class Copy:
    """One library: where, its version, providers that opened; or why it gave no answer."""

    path: str
    version: tuple[int, int] | None = None
    providers: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Libfabric:
    """Copies found, in the order in which they are preferred."""

    copies: tuple[Copy, ...] = ()

    def with_provider(self, name: str) -> Copy | None:
        """Return the first copy that opens provider ``name``."""
        return next((copy for copy in self.copies if name in copy.providers), None)


def probe(
    candidates: Sequence[str] = CANDIDATES, ask: Callable[..., Any] = foreign.ask
) -> Libfabric:
    """Ask every candidate that exists, each in a process of its own."""
    there = [path for path in candidates if "/" not in path or Path(path).exists()]
    copies = [_copy(path, ask("libfabric", path)) for path in there]
    return Libfabric(tuple(copy for copy in copies if copy is not None))


def _copy(path: str, answer: Any) -> Copy | None:
    if isinstance(answer, Failure):
        return Copy(path, error=answer.why)
    if answer is None:
        return None
    major, minor = answer["version"]
    return Copy(path, (major, minor), tuple(answer["providers"]))


def findings(libfabric: Libfabric) -> list[Finding]:
    if not libfabric.copies:
        return [absent(TOPIC, "library", "not found", INSTALL)]
    return [_finding(copy) for copy in libfabric.copies]


def _finding(copy: Copy) -> Finding:
    if copy.error is not None or copy.version is None:
        return bad(TOPIC, "library", f"{copy.path}: {copy.error}", INSTALL)
    providers = ", ".join(copy.providers) or "none"
    version = ".".join(map(str, copy.version))
    return ok(TOPIC, "library", f"{version} ({copy.path}), providers: {providers}")


# ---- In the child process (see `foreign`) -------------------------------------------------------


class _FabricAttr(ctypes.Structure):
    """struct fi_fabric_attr, its head; the same in libfabric 1.17 to 2.5."""

    _fields_ = [
        ("fabric", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("prov_name", ctypes.c_char_p),
    ]


class _Info(ctypes.Structure):
    """struct fi_info, as far as ``fabric_attr``."""


_Info._fields_ = [
    ("next", ctypes.POINTER(_Info)),
    ("before", ctypes.c_ubyte * 96),
    ("fabric_attr", ctypes.POINTER(_FabricAttr)),
]


def list_providers(path: str) -> dict[str, Any] | None:
    """Return version and providers of the library at ``path``; ``None`` when there is none."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        if "/" in path:
            raise
        if "cannot open shared object file: No such file" in str(error):
            return None
        raise
    library.fi_version.restype = ctypes.c_uint32
    number = library.fi_version()
    version = (number >> 16, number & 0xFFFF)
    return {"version": version, "providers": _providers(library, min(version, _NEWEST_API))}


def _providers(library: Any, api: tuple[int, int]) -> list[str]:
    first = ctypes.POINTER(_Info)()
    library.fi_getinfo.argtypes = [
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.POINTER(_Info)),
    ]
    code = library.fi_getinfo(api[0] << 16 | api[1], None, None, 0, None, ctypes.byref(first))
    names: dict[str, None] = {}
    info = first
    while code == 0 and info:
        names[info.contents.fabric_attr.contents.prov_name.decode()] = None
        info = info.contents.next
    return list(names)
