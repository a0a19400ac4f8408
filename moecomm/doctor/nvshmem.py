"""Copies of NVSHMEM: whole or half, and whether host and device halves are of one version."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moecomm.doctor import foreign
from moecomm.doctor.finding import Finding, absent, bad, ok
from moecomm.doctor.foreign import Failure
from moecomm.kernels.jit import fatbin
from moecomm.nvshmem_copy import ARCHIVE as _ARCHIVE
from moecomm.nvshmem_copy import HOST_LIBRARY, Version, header_version
from moecomm.nvshmem_copy import VERSION_HEADER as _VERSION_HEADER
from moecomm.nvshmem_copy import host_library as _host_library
from moecomm.nvshmem_copy import roots as _roots
from moecomm.nvshmem_copy import text as _text

TOPIC: Final = "NVSHMEM"
INSTALL: Final = 'pip install "moecomm[nvshmem]"'


@dataclass(frozen=True, slots=True)
class Copy:
    """One directory that should hold NVSHMEM.

    ``device`` is the version of its headers, which belong to the archive beside them; ``host``
    that of its host library, as the library itself says. ``missing`` lists absent parts.
    """

    root: Path
    missing: tuple[str, ...] = ()
    device: Version | None = None
    host: Version | None = None
    archs: tuple[str, ...] = ()
    error: str | None = None

    @property
    def whole(self) -> bool:
        return not self.missing and self.device is not None and self.error is None


@dataclass(frozen=True, slots=True)
class Nvshmem:
    """All copies in the order in which they are tried, and the library the loader would take.

    ``loader`` is (path, version) of a host library on ``LD_LIBRARY_PATH``, which wins over the
    one of a wheel when something loads it by name alone.
    """

    copies: tuple[Copy, ...] = ()
    loader: tuple[Path, Version | None] | None = None

    @property
    def chosen(self) -> Copy | None:
        """The first whole copy."""
        return next((copy for copy in self.copies if copy.whole), None)

    @property
    def conflict(self) -> str | None:
        """Why host and device halves do not fit; both versions and both paths."""
        chosen = self.chosen
        if chosen is None:
            return None
        device = f"device code {_text(chosen.device)} ({chosen.root / _ARCHIVE})"
        if chosen.host is not None and chosen.host != chosen.device:
            return f"{device}, host library {_text(chosen.host)} ({_host_library(chosen.root)})"
        if self.loader is not None and self.loader[1] not in (None, chosen.device):
            path, version = self.loader
            return f"{device}, host library {_text(version)} ({path}, from LD_LIBRARY_PATH)"
        return None


def probe(
    environ: Mapping[str, str] = os.environ,
    roots: Iterable[Path] | None = None,
    ask: Callable[..., Any] = foreign.ask,
) -> Nvshmem:
    """Look where NVSHMEM may be, and read the versions of every part."""
    copies = [_read(root, ask) for root in (_roots(environ) if roots is None else roots)]
    return Nvshmem(tuple(copies), _loader(environ, ask))


def _read(root: Path, ask: Callable[..., Any]) -> Copy:
    host = _host_library(root)
    parts = {HOST_LIBRARY: host, _ARCHIVE: root / _ARCHIVE, _VERSION_HEADER: root / _VERSION_HEADER}
    missing = tuple(name for name, path in parts.items() if path is None or not path.is_file())
    try:
        archive = root / _ARCHIVE
        archs = fatbin.archs(archive.read_bytes()) if archive.is_file() else []
        device = header_version(root)
    except OSError as refused:
        return Copy(root, missing, error=str(refused))
    if not missing and (device is None or not archs):
        what = "no version in its headers" if device is None else f"no GPU code in {_ARCHIVE}"
        return Copy(root, missing, device, error=what)
    version, error = _ask_host(host, ask)
    return Copy(root, missing, device, version, tuple(archs), error)


def _ask_host(library: Path | None, ask: Callable[..., Any]) -> tuple[Version | None, str | None]:
    """The version a host library states, or why it states none."""
    if library is None:
        return None, None
    answer = ask("nvshmem", str(library))
    if isinstance(answer, Failure):
        return None, f"{library}: {answer.why}"
    return tuple(answer), None


def _loader(
    environ: Mapping[str, str], ask: Callable[..., Any]
) -> tuple[Path, Version | None] | None:
    for entry in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        library = Path(entry) / HOST_LIBRARY
        if library.is_file():
            return library, _ask_host(library, ask)[0]
    return None


def host_version(library: str) -> list[int]:
    """In a child process (see ``foreign``): ask a host library for its version."""
    numbers = [ctypes.c_int() for _ in range(3)]
    host = ctypes.CDLL(library)
    code = host.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    if code:
        raise OSError(f"nvshmemx_vendor_get_version_info returns {code}")
    return [number.value for number in numbers]


def findings(nvshmem: Nvshmem, gpu_archs: Iterable[str] = ()) -> list[Finding]:
    """``gpu_archs``: architectures of the GPUs here ("sm_90")."""
    found = [_rejected(copy) for copy in nvshmem.copies if not copy.whole]
    chosen = nvshmem.chosen
    if chosen is None:
        return [*found, absent(TOPIC, "library", "no whole copy found", INSTALL)]
    text = f"{_text(chosen.device)} in {chosen.root}, for {', '.join(chosen.archs)}"
    found.append(ok(TOPIC, "library", text))
    for arch in sorted(set(gpu_archs)):
        lacks = lacks_arch(chosen, arch)
        if lacks is not None:
            found.append(bad(TOPIC, "device code", lacks, f"{INSTALL} --upgrade"))
    if nvshmem.conflict is not None:
        detail = f"{nvshmem.conflict}: two versions in one run hang instead of failing"
        found.append(bad(TOPIC, "versions", detail, _conflict_fix(nvshmem, chosen)))
    return found


def lacks_arch(copy: Copy, arch: str) -> str | None:
    """Why the device archive of ``copy`` does not link for ``arch``; ``None`` when it does.

    Machine code also serves later minor versions of its major version (sm_80 code on sm_86).
    """
    number = int("".join(filter(str.isdigit, arch)))
    held = [int(name.removeprefix("sm_")) for name in copy.archs if name.startswith("sm_")]
    if any(have // 10 == number // 10 and have <= number for have in held):
        return None
    return f"no code for {arch} in {copy.root / _ARCHIVE}, only for {', '.join(copy.archs)}"


def _conflict_fix(nvshmem: Nvshmem, chosen: Copy) -> str:
    if nvshmem.loader is not None and chosen.host == chosen.device:
        return f"remove {nvshmem.loader[0].parent} from LD_LIBRARY_PATH"
    release = ".".join(map(str, chosen.device or ()))
    return f"pip install --force-reinstall nvidia-nvshmem-cu13=={release}"


def _rejected(copy: Copy) -> Finding:
    why = f"lacks {', '.join(copy.missing)}" if copy.missing else copy.error
    return bad(TOPIC, "library", f"{copy.root} is not used: {why or 'unknown version'}", INSTALL)
