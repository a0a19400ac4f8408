"""The few CUDA driver calls that the package makes, with errors as exceptions.

Works on the device's primary context, the one that torch and CuPy use, and leaves the caller's
current context as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Final

from moecomm.errors import ConfigError, MoecommError, TransportUnavailable

MODULE = "cuda.bindings.driver"  # tests without a GPU name another
OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY
NOT_READY: Final = 802  # CUDA_ERROR_SYSTEM_NOT_READY


class DriverError(MoecommError):
    """A driver call failed; ``code`` is its ``CUresult``."""

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def driver() -> Any:
    """``cuda.bindings.driver``, initialised.

    Raises:
        TransportUnavailable: the package or an NVIDIA driver is missing.
    """
    try:
        module = importlib.import_module(MODULE)
        call(module.cuInit, 0)
    except ImportError as error:
        raise TransportUnavailable(
            'cuda.bindings is not installed: pip install "moecomm[cuda13]"'
        ) from error
    except (RuntimeError, MoecommError) as error:
        hint = ""
        if isinstance(error, DriverError) and error.code == NOT_READY:
            hint = ": the NVLink fabric is not up; start nvidia-fabricmanager (as root)"
        raise TransportUnavailable(f"no usable NVIDIA driver: {error}{hint}") from error
    return module


def call(function: Any, *args: Any) -> Any:
    """The result of a driver call: nothing, a value, or a tuple of values.

    Raises:
        DriverError: the call failed; names it and the driver's error.
    """
    status, *values = function(*args)
    check(status, function.__name__)
    return values[0] if len(values) == 1 else tuple(values)


def check(status: Any, function: str) -> None:
    """Raise ``DriverError`` unless ``status``, of a call of ``function``, is success."""
    if int(status) != 0:
        name = getattr(status, "name", "unknown error")
        raise DriverError(f"{function} failed: {name} ({int(status)})", int(status))


def device_count() -> int:
    """GPUs that this process sees."""
    return int(call(driver().cuDeviceGetCount))


@functools.cache
def device(index: int) -> Any:
    """The device, without a context on it.

    Raises:
        ConfigError: no such device.
    """
    count = device_count()
    if index >= count:
        raise ConfigError(f"device='cuda:{index}': this process sees {count} GPUs")
    return call(driver().cuDeviceGet, index)


@functools.cache
def context(index: int) -> Any:
    """The device's primary context, which takes hundreds of MiB of it."""
    return call(driver().cuDevicePrimaryCtxRetain, device(index))


@contextlib.contextmanager
def current(index: int) -> Iterator[Any]:
    """The driver, with the device's primary context current; afterwards the caller's is again."""
    cu = driver()
    ours = context(index)
    if call(cu.cuCtxGetCurrent) == ours:
        yield cu
        return
    call(cu.cuCtxPushCurrent, ours)
    try:
        yield cu
    finally:
        call(cu.cuCtxPopCurrent)


def current_device() -> int | None:
    """Index of the device whose context is current in this thread; ``None`` without one."""
    cu = driver()
    if int(call(cu.cuCtxGetCurrent)) == 0:
        return None
    return int(call(cu.cuCtxGetDevice))


def attribute(index: int, name: str) -> int:
    """A ``CU_DEVICE_ATTRIBUTE_*`` of the device, without the prefix."""
    cu = driver()
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(cu.cuDeviceGetAttribute, key, device(index)))


def device_name(index: int) -> str:
    """What the driver calls the device; a MIG slice's name has " MIG " in it."""
    raw: bytes = call(driver().cuDeviceGetName, 256, device(index))
    return raw.split(b"\0")[0].decode()


def device_uuid(index: int) -> str:
    """32 hexadecimal digits, the same in every process however it numbers its devices."""
    cu = driver()
    ask = getattr(cu, "cuDeviceGetUuid_v2", None) or cu.cuDeviceGetUuid  # the first knows MIG
    return bytes(call(ask, device(index)).bytes).hex()


def free_bytes(index: int) -> int:
    """Memory of the device that nobody has taken."""
    with current(index) as cu:
        return int(call(cu.cuMemGetInfo)[0])


def synchronize(index: int) -> None:
    """Wait for everything that this process has queued on the device."""
    with current(index) as cu:
        call(cu.cuCtxSynchronize)


class PinnedMemory:
    """Zeroed host memory that kernels of every device can write."""

    def __init__(self, index: int, nbytes: int) -> None:
        self._index = index
        with current(index) as cu:
            flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
            self.address = int(call(cu.cuMemHostAlloc, nbytes, flags))
        ctypes.memset(self.address, 0, nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self.address:
            with current(self._index) as cu:
                call(cu.cuMemFreeHost, self.address)
            self.address = 0


def copy_to_device(index: int, address: int, data: bytes) -> None:
    """Copy, and wait for it."""
    with current(index) as cu:
        call(cu.cuMemcpyHtoD, address, data, len(data))
        # It returns when ``data`` has been read: up to 64 KiB may not be there yet, and kernels of
        # other streams, or of peers, would see what was before (seen with three ranks on an H200).
        call(cu.cuStreamSynchronize, 0)


def copy_from_device(index: int, address: int, nbytes: int) -> bytes:
    """Copy, and wait for it."""
    data = bytearray(nbytes)
    with current(index) as cu:
        call(cu.cuMemcpyDtoH, data, address, nbytes)
    return bytes(data)
