"""NVSHMEM's device archive, linked to kernels that put (``cuda/nvshmem.cuh``).

The kernels call functions of the archive by the names that C++ gave them, which holds for the
releases below. Headers are not read by the compiler; their version is that of the archive beside
them, or something is wrong with the copy.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm import nvshmem_copy
from moecomm.errors import CompileError, TransportUnavailable
from moecomm.kernels.jit import LinkInput, compile_source, elf
from moecomm.nvshmem_copy import ARCHIVE, Version, header_version, text

RELEASES: Final = ((3, 4),)  # whose archives have the names that nvshmem.cuh calls
_VERSION_SYMBOL: Final = "nvshmemi_device_lib_version_d"
# Links against what carries the version.
_PROBE: Final = """
extern "C" __device__ void _Z36nvshmemi_transfer_syncapi_update_memv();
extern "C" __global__ void nvshmem_probe() { _Z36nvshmemi_transfer_syncapi_update_memv(); }
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of NVSHMEM that kernels are linked with."""

    root: Path
    headers: Version

    @property
    def archive(self) -> Path:
        return self.root / ARCHIVE

    @property
    def link(self) -> tuple[LinkInput, ...]:
        return (LinkInput(str(self.archive)),)


def find_copy() -> Copy:
    """The first copy that has headers and a device archive.

    Raises:
        TransportUnavailable: there is none.
    """
    tried = nvshmem_copy.roots()
    for root in tried:
        headers = header_version(root)
        if headers is not None and (root / ARCHIVE).is_file():
            return Copy(root, headers)
    where = ", ".join(map(str, tried)) or "no directory that could hold it"
    raise TransportUnavailable(
        f"transport='nvshmem': no copy of NVSHMEM with headers and {ARCHIVE} (looked at {where}); "
        'run pip install "moecomm[nvshmem]"'
    )


def archive_version(copy: Copy, arch: str) -> Version | None:
    """What the device archive says it is; ``None``: nothing.

    Raises:
        CompileError: it does not link for ``arch``.
    """
    compiled = compile_source("nvshmem_probe.cu", _PROBE, arch, link=copy.link)
    data = elf.symbol_bytes(compiled.path.read_bytes(), _VERSION_SYMBOL)
    return None if data is None or len(data) < 12 else struct.unpack_from("<3i", data)


def check_versions(copy: Copy, arch: str, host: Version, path: str = "") -> None:
    """Check that the parts of NVSHMEM are of one version, one whose device functions are known.

    Two versions in one run hang instead of failing. ``host``: what the host library at
    ``path`` says.

    Raises:
        TransportUnavailable: they are not; the message has all three.
    """
    try:
        archive, why = archive_version(copy, arch), ""
    except CompileError as error:
        archive, why = None, f" (it does not link for {arch}: {str(error).splitlines()[0]})"
    found = (
        f"headers {text(copy.headers)} and archive {text(archive)}{why} in {copy.root}, "
        f"host library {text(host)}" + (f" at {path}" if path else "")
    )
    if not copy.headers == archive == host:
        raise TransportUnavailable(
            f"transport='nvshmem': {found}: must be one version; run "
            f"pip install --force-reinstall nvidia-nvshmem-cu13=={text(copy.headers)}, and see "
            "that LD_LIBRARY_PATH names no other"
        )
    if host[:2] not in RELEASES:
        known = ", ".join(".".join(map(str, release)) for release in RELEASES)
        raise TransportUnavailable(
            f"transport='nvshmem': {found}: kernels know the device functions of NVSHMEM {known}"
        )
