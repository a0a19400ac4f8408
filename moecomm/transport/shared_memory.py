"""Ways to give processes of one machine the same memory, without leaving a name behind.

Each way makes memory on one rank (``make``) and opens it on another from an *offer*, a small
dictionary that travels between them as JSON.

* ``Memfd``: a memfd, opened by peers through ``/proc/PID/fd``. It never has a name, so nothing is
  left in ``/dev/shm`` whatever kills its processes, and the size of ``/dev/shm`` does not matter.
* ``TempFile``: where that does not work (macOS, a hidden ``/proc``): a file in the temporary
  directory, unlinked as soon as every rank has opened it.
* ``InProcess``: ranks that are threads of one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import socket
import tempfile
import weakref
from pathlib import Path
from typing import Any, Final, Protocol

Offer = dict[str, Any]


class Mapping:
    """Memory mapped into this process. Unmapped when the last reference to it, or to a buffer
    taken from it, goes: an array that a caller still holds never dangles."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.nbytes = len(memory)

    def buffer(self) -> memoryview:
        """The bytes; keeps the mapping alive."""
        return memoryview(self._memory)


class Way(Protocol):
    """One way to share memory; an instance serves one allocation."""

    def make(self, nbytes: int) -> tuple[Mapping, Offer]: ...
    def open(self, offer: Offer, nbytes: int) -> Mapping: ...
    def everyone_has_opened(self) -> None: ...


class Memfd:
    """Anonymous files, opened by peers through ``/proc``."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def make(self, nbytes: int) -> tuple[Mapping, Offer]:
        """Memory of ``nbytes``, all zero; ``OSError`` where there are no memfds."""
        if not hasattr(os, "memfd_create"):
            raise OSError("memfd_create is missing on this system")
        self._fd = os.memfd_create("moecomm", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        # The number of a process means another one in another container: peers compare the file.
        offer = {
            "pid": os.getpid(),
            "fd": self._fd,
            "file": _identity(self._fd),
            "machine": _machine(),
        }
        return Mapping(mmap.mmap(self._fd, nbytes)), offer

    def open(self, offer: Offer, nbytes: int) -> Mapping:
        """The memory that a peer made; ``OSError`` where this process cannot reach it."""
        if offer["machine"] != _machine():
            raise OSError(f"it is on another machine, {offer['machine']}")
        path = f"/proc/{offer['pid']}/fd/{offer['fd']}"
        return _map_file(path, offer, nbytes)

    def everyone_has_opened(self) -> None:
        """The mappings keep the memory alive from here on."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class TempFile:
    """Files in the temporary directory, which lose their name before they are used."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def make(self, nbytes: int) -> tuple[Mapping, Offer]:
        """Memory of ``nbytes``, all zero."""
        fd, name = tempfile.mkstemp(prefix="moecomm-")
        self._path = Path(name)
        try:
            os.ftruncate(fd, nbytes)
            offer = {"path": name, "file": _identity(fd)}
            return Mapping(mmap.mmap(fd, nbytes)), offer
        finally:
            os.close(fd)

    def open(self, offer: Offer, nbytes: int) -> Mapping:
        """The memory that a peer made; ``OSError`` where this process cannot reach it."""
        return _map_file(offer["path"], offer, nbytes)

    def everyone_has_opened(self) -> None:
        """Remove the name."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None


class InProcess:
    """Memory that other threads reach by its address; every opener keeps it alive."""

    _tokens: Final = itertools.count()
    _made: Final[weakref.WeakValueDictionary[int, Mapping]] = weakref.WeakValueDictionary()

    def make(self, nbytes: int) -> tuple[Mapping, Offer]:
        """Memory of ``nbytes``, all zero."""
        mapping = Mapping(mmap.mmap(-1, nbytes))
        token = next(self._tokens)
        self._made[token] = mapping
        return mapping, {"token": token}

    def open(self, offer: Offer, nbytes: int) -> Mapping:
        """The very mapping that a peer made."""
        return self._made[offer["token"]]

    def everyone_has_opened(self) -> None:
        """Nothing to undo."""


def _map_file(path: str, offer: Offer, nbytes: int) -> Mapping:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(fd) != offer["file"]:
            raise OSError(f"{path} is another file here (another container or machine?)")
        return Mapping(mmap.mmap(fd, nbytes))
    finally:
        os.close(fd)


def _identity(fd: int) -> list[int]:
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino, status.st_size]


def _machine() -> str:
    """Names the running kernel: device and file numbers mean the same within one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
