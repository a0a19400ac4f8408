"""The few CUDA driver calls that the package makes, with errors as exceptions.

Works on the device's primary context, the one that torch and CuPy use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import weakref
from typing import Any

from moecomm.errors import ConfigError, MoecommError, TransportUnavailable


@functools.cache
def driver() -> Any:
    """``cuda.bindings.driver``, initialised.

    Raises:
        TransportUnavailable: the package or an NVIDIA driver is missing.
    """
    try:
        module = importlib.import_module("cuda.bindings.driver")
        call(module.cuInit, 0)
    except ImportError as error:
        raise TransportUnavailable(
            'cuda.bindings is not installed: pip install "moecomm[cuda13]"'
        ) from error
    except (RuntimeError, MoecommError) as error:
        raise TransportUnavailable(f"no usable NVIDIA driver: {error}") from error
    return module


def call(function: Any, *args: Any) -> Any:
    """The result of a driver call: nothing, a value, or a tuple of values.

    Raises:
        MoecommError: the call failed; names it and the driver's error.
    """
    status, *values = function(*args)
    if int(status) != 0:
        raise MoecommError(f"{function.__name__} failed: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def open_device(index: int) -> tuple[Any, Any]:
    """The device and its primary context, made current.

    Raises:
        ConfigError: no such device.
    """
    cu = driver()
    count = call(cu.cuDeviceGetCount)
    if index >= count:
        raise ConfigError(f"device='cuda:{index}': this process sees {count} GPUs")
    device = call(cu.cuDeviceGet, index)
    return device, call(cu.cuDevicePrimaryCtxRetain, device)


def make_current(index: int) -> None:
    call(driver().cuCtxSetCurrent, open_device(index)[1])


def attribute(index: int, name: str) -> int:
    """A ``CU_DEVICE_ATTRIBUTE_*`` of the device, without the prefix."""
    cu = driver()
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(cu.cuDeviceGetAttribute, key, open_device(index)[0]))


class DeviceMemory:
    """Zeroed device memory, freed when the last reference to this object goes."""

    def __init__(self, index: int, nbytes: int) -> None:
        make_current(index)
        cu = driver()
        pointer = call(cu.cuMemAlloc, nbytes)
        weakref.finalize(self, _free, index, pointer).atexit = False
        self.address = int(pointer)
        call(cu.cuMemsetD8, pointer, 0, nbytes)
        call(cu.cuCtxSynchronize)


def _free(index: int, pointer: Any) -> None:
    make_current(index)
    call(driver().cuMemFree, pointer)


class PinnedMemory:
    """Zeroed host memory that kernels of every device can write."""

    def __init__(self, index: int, nbytes: int) -> None:
        make_current(index)
        cu = driver()
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        self._index = index
        self.address = int(call(cu.cuMemHostAlloc, nbytes, flags))
        ctypes.memset(self.address, 0, nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self.address:
            make_current(self._index)
            call(driver().cuMemFreeHost, self.address)
            self.address = 0


def copy_to_device(address: int, data: bytes) -> None:
    call(driver().cuMemcpyHtoD, address, data, len(data))


def copy_from_device(address: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    call(driver().cuMemcpyDtoH, data, address, nbytes)
    return bytes(data)
