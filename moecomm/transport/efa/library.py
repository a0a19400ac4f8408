"""libfabric itself: found, loaded, asked for interfaces; and calls through its tables."""

from __future__ import annotations

import contextlib
import ctypes as C
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moecomm import env
from moecomm.errors import TransportUnavailable
from moecomm.transport.efa import abi
from moecomm.transport.efa.fabrics import Fabric

logger = logging.getLogger(__name__)

# AWS's own build, the mpich wheel's (2.5, has efa), the system's (Debian's 1.17 has no efa).
CANDIDATES: Final = (
    "/opt/amazon/efa/lib/libfabric.so.1",
    "/opt/amazon/efa/lib64/libfabric.so.1",
    f"{sys.prefix}/lib/mpich/libfabric.so.1",
    "libfabric.so.1",
)
INSTALL: Final = 'pip install "moecomm[efa]"'
_NEWEST_API: Final = (1, 22)
_OLDEST_API: Final = (1, 17)


def word(address: int, offset: int = 0) -> int:
    """The pointer or 64-bit number at an address."""
    return int(C.c_uint64.from_address(address + offset).value)


def half(address: int, offset: int) -> int:
    """The 32-bit number there."""
    return int(C.c_uint32.from_address(address + offset).value)


def set_word(address: int, offset: int, value: int) -> None:
    """Store 64 bits."""
    C.c_uint64.from_address(address + offset).value = value & (1 << 64) - 1


def set_half(address: int, offset: int, value: int) -> None:
    """Store 32 bits."""
    C.c_uint32.from_address(address + offset).value = value & (1 << 32) - 1


def function(fid: int, ops: int, place: int) -> int:
    """Address of the function at ``place`` of the table at ``ops`` of a libfabric object."""
    return word(word(fid, ops), place)


def call(fid: int, ops: int, place: int, *arguments: int) -> int:
    """Call such a function with the object first. ``int``, pointers and sizes are all passed as
    64 bits, which the platforms' calling conventions allow."""
    kind = C.CFUNCTYPE(C.c_int, *[C.c_uint64] * (1 + len(arguments)))
    values = [value & (1 << 64) - 1 for value in (fid, *arguments)]
    return int(kind(function(fid, ops, place))(*values))


def text(address: int) -> str:
    """The C string at an address; empty for a null pointer."""
    return C.string_at(address).decode(errors="replace") if address else ""


class Library:
    """One loaded copy of libfabric."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = C.CDLL(path, use_errno=True)
        self._library.fi_version.restype = C.c_uint32
        version = self._library.fi_version()
        self.version = (version >> 16, version & 0xFFFF)
        self.api = min(self.version, _NEWEST_API)  # a newer one than its own is refused
        self._library.fi_dupinfo.restype = C.c_void_p
        self._library.fi_dupinfo.argtypes = [C.c_void_p]
        self._library.fi_freeinfo.argtypes = [C.c_void_p]
        self._library.fi_fabric.argtypes = [C.c_void_p, C.POINTER(C.c_void_p), C.c_void_p]
        self._library.fi_strerror.restype = C.c_char_p
        self._library.fi_getinfo.argtypes = [
            C.c_uint32, C.c_char_p, C.c_char_p, C.c_uint64, C.c_void_p, C.POINTER(C.c_void_p),
        ]  # fmt: skip

    def strerror(self, code: int) -> str:
        """What an error number means."""
        return str(self._library.fi_strerror(abs(code)).decode(errors="replace"))

    def open_fabric(self, info: int) -> tuple[int, int]:
        """Result code, and the fabric of an ``fi_info``."""
        out = C.c_void_p()
        code = self._library.fi_fabric(word(info, abi.INFO_FABRIC_ATTR), C.byref(out), None)
        return int(code), out.value or 0

    def free(self, info: int) -> None:
        """Give an ``fi_info`` back."""
        self._library.fi_freeinfo(info)

    def interfaces(self, fabric: Fabric, on_gpu: bool) -> tuple[int, list[int]]:
        """Result code of ``fi_getinfo``, and an ``fi_info`` for every interface, which the caller
        gives back with ``free``."""
        node = fabric.node.encode() if fabric.node is not None else None
        flags = abi.FI_SOURCE if node is not None else 0
        out = C.c_void_p()
        with self._hints(fabric, on_gpu) as hints:
            api = self.api[0] << 16 | self.api[1]
            code = self._library.fi_getinfo(api, node, None, flags, hints, C.byref(out))
        found: list[int] = []
        info = out.value if code == 0 else None
        while info:
            found.append(self._library.fi_dupinfo(info))
            info = word(info, abi.INFO_NEXT)
        if out.value and code == 0:
            self._library.fi_freeinfo(out)
        return int(code), found

    @contextlib.contextmanager
    def _hints(self, fabric: Fabric, on_gpu: bool) -> Iterator[int]:
        hints: int = self._library.fi_dupinfo(None)
        strings = _Strings()
        try:
            caps = fabric.all_caps | (abi.FI_HMEM if on_gpu else 0)
            set_word(hints, abi.INFO_CAPS, caps)
            set_word(hints, abi.INFO_MODE, fabric.modes)
            set_half(word(hints, abi.INFO_EP_ATTR), abi.EP_TYPE, abi.FI_EP_RDM)
            names = word(hints, abi.INFO_FABRIC_ATTR)
            set_word(names, abi.FABRIC_PROV_NAME, strings.copy(fabric.provider))
            if fabric.fabric is not None:
                set_word(names, abi.FABRIC_NAME, strings.copy(fabric.fabric))
            domain = word(hints, abi.INFO_DOMAIN_ATTR)
            set_half(domain, abi.DOMAIN_THREADING, abi.FI_THREAD_DOMAIN)
            mr_mode = fabric.mr_mode | (abi.FI_MR_HMEM if on_gpu else 0)
            set_half(domain, abi.DOMAIN_MR_MODE, mr_mode)
            transmit = word(hints, abi.INFO_TX_ATTR)
            set_word(transmit, abi.TX_OP_FLAGS, fabric.op_flags)
            yield hints
        finally:
            self._library.fi_freeinfo(hints)


class _Strings:
    """Copies that ``fi_freeinfo`` may free: from the C library's own allocator."""

    def __init__(self) -> None:
        self._strdup = C.CDLL(None).strdup
        self._strdup.restype = C.c_void_p

    def copy(self, value: str) -> int:
        return int(self._strdup(value.encode()))


@functools.cache
def load(path: str) -> Library | None:
    """The library at ``path``; ``None`` when there is none that loads."""
    if "/" in path and not Path(path).exists():
        return None
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        logger.debug("%s is not usable: %s", path, error)
        return None
    if library.version < _OLDEST_API:
        logger.debug("%s is libfabric %d.%d: too old", path, *library.version)
        return None
    return library


def copies() -> list[Library]:
    """Every copy of libfabric that loads, preferred ones first; one alone where
    ``MOECOMM_LIBFABRIC`` names it.

    Raises:
        TransportUnavailable: there is none.
    """
    chosen = env.get("LIBFABRIC")
    candidates = CANDIDATES if chosen is None else (chosen,)
    found = [library for path in candidates if (library := load(path)) is not None]
    if not found:
        raise TransportUnavailable(
            f"transport='efa': no libfabric {'.'.join(map(str, _OLDEST_API))} or newer among "
            f"{', '.join(candidates)}: {INSTALL}"
        )
    return found
