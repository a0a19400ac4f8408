"""NVSHMEM's host library, through nvshmem4py: the few calls that a symmetric heap takes.

Everything here blocks until all processing elements (PEs) have come; ``bounded`` puts an end to
that. Tests replace ``load``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from moecomm.cuda_driver import current
from moecomm.errors import PeerTimeout, TransportError, TransportUnavailable

T = TypeVar("T")
INITIALIZED: Final = 2  # NVSHMEM_STATUS_IS_INITIALIZED; more with several PEs a GPU
INSTALL: Final = 'pip install "moecomm[nvshmem]"'


class Library:
    """The loaded library. ``version`` is its own word."""

    def __init__(self, bindings: Any, path: str) -> None:
        self._bindings = bindings
        # For calls in which nvshmem4py keeps Python's lock: others must run while we wait.
        self._host = ctypes.CDLL(path)
        self._host.nvshmem_malloc.restype = ctypes.c_void_p
        self._host.nvshmem_malloc.argtypes = [ctypes.c_size_t]
        self._host.nvshmem_free.restype = None
        self._host.nvshmem_free.argtypes = [ctypes.c_void_p]
        self._host.nvshmemx_hostlib_finalize.restype = None
        parts = [ctypes.c_int() for _ in range(3)]
        bindings.vendor_get_version_info(*map(ctypes.addressof, parts))
        self.path = path
        self.version: tuple[int, ...] = tuple(part.value for part in parts)

    def unique_id(self) -> bytes:
        """A new identity for one group of PEs, which its rank 0 hands out."""
        made = self._bindings.uniqueid()
        self._bindings.get_uniqueid(made.ptr)
        return ctypes.string_at(made.ptr, made._data.nbytes)

    def init(self, rank: int, size: int, unique_id: bytes) -> None:
        """Become PE ``rank`` of ``size``, on the current CUDA device. Collective.

        Raises:
            TransportError: the PEs have met, but there is no heap: it found no device.
        """
        bindings = self._bindings
        given, attributes = bindings.uniqueid(), bindings.InitAttr()
        ctypes.memmove(given.ptr, unique_id, len(unique_id))
        bindings.set_attr_uniqueid_args(rank, size, given.ptr, attributes.ptr)
        bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
        status = bindings.init_status()
        if status < INITIALIZED:
            raise TransportError(
                f"nvshmem_init: no heap on this process's GPU (nvshmemx_init_status is {status})",
                transport="nvshmem", operation="nvshmem_init", code=status,
            )  # fmt: skip

    def finalize(self) -> None:
        """Give the heap back. Collective; afterwards ``init`` may be called again."""
        self._host.nvshmemx_hostlib_finalize()

    def allocate(self, nbytes: int) -> int:
        """Address of new symmetric memory; 0: the heap has no room. Collective."""
        return int(self._host.nvshmem_malloc(nbytes) or 0)

    def free(self, address: int) -> None:
        """Collective."""
        self._host.nvshmem_free(address)

    def pointer(self, address: int, pe: int) -> int:
        """Where this process loads and stores what ``pe`` has at ``address``; 0: nowhere."""
        return int(self._bindings.ptr(address, pe))

    def module_init(self, module: Any) -> None:
        """Let the device code in a loaded CUmodule know the heap.

        Raises:
            TransportError: NVSHMEM refuses it.
        """
        self._check(self._bindings.cumodule_init(int(module)), "cumodule_init")

    def module_finalize(self, module: Any) -> None:
        """Before the module is unloaded."""
        self._check(self._bindings.cumodule_finalize(int(module)), "cumodule_finalize")

    def _check(self, status: int | None, what: str) -> None:
        if status:
            raise TransportError(
                f"nvshmemx_{what} returns {status}", transport="nvshmem", operation=what,
                code=status,
            )  # fmt: skip


@functools.cache
def load() -> Library:
    """The library of this process, loaded once.

    Raises:
        TransportUnavailable: nvshmem4py or the library is missing.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        bindings = importlib.import_module("nvshmem.bindings")
    except ImportError as error:
        raise TransportUnavailable(
            f"transport='nvshmem': Python package {error.name} is not installed: {INSTALL}"
        ) from error
    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path
        return Library(bindings, path)
    except (pathfinder.DynamicLibNotFoundError, OSError, RuntimeError) as error:
        raise TransportUnavailable(
            f"transport='nvshmem': libnvshmem_host does not load: "
            f"{str(error).splitlines()[0]}: {INSTALL}"
        ) from error


def bounded(index: int, what: str, call: Callable[[], T], timeout_s: float, peer: int) -> T:
    """``call`` with GPU ``index`` current, in a thread that is left behind when its time is over.

    Raises:
        PeerTimeout: it is; ``peer`` stands for those that did not come, ``phase`` is ``what``.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with current(index):
                done.append(call())
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=work, name=f"moecomm {what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed and type(failed[0]).__module__.startswith("nvshmem"):
        raise TransportError(
            f"{what} failed: {failed[0]}", transport="nvshmem", operation=what
        ) from failed[0]
    if failed:
        raise failed[0]
    if not done:
        raise PeerTimeout(what, peer, 1, 0)
    return done[0]
