"""``HostFlag``: 64-bit words that the worker stores and a GPU polls, or the other way round.

Three kinds of memory give a host address, so that the loop needs to know of none:

* ``pinned``: host memory that the GPU maps. The GPU reads it over PCIe. Works everywhere, and is
  the best choice for words that the GPU writes, since the host then polls its own memory.
* ``gdr``: GPU memory mapped by GDRCopy (``/dev/gdrdrv``).
* ``dmabuf``: GPU memory mapped through a DMA-BUF, with a driver of CUDA 13.3 or newer.

Words hold numbers that only grow, so that nothing is reset between uses. Each has 128 bytes to
itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.transport.engine.blocks import Block

FLAG_BYTES: Final = 128
BACKENDS: Final = ("pinned", "gdr", "dmabuf")
_DMABUF_DRIVER: Final = 13030  # CUDA 13.3: mmap of a DMA-BUF of a discrete GPU
_PORTABLE_MAPPED: Final = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_GPU_PAGE: Final = 1 << 16


class HostFlag:
    """One word: ``address`` for the host, ``device_address`` for the GPU; the same word."""

    def __init__(self, address: int, device_address: int, keep: object) -> None:
        self.address = address
        self.device_address = device_address
        self._word = ctypes.c_int64.from_address(address)
        self._keep = keep  # what the word lies in

    @property
    def value(self) -> int:
        """What is there now."""
        return int(self._word.value)

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


class Flags:
    """``count`` words of one kind, all zero.

    Args:
        count: how many.
        cuda_device: the GPU that polls or writes them; ``None``: no GPU, plain memory.
        backend: ``"pinned"``, ``"gdr"`` or ``"dmabuf"``.

    Raises:
        ConfigError: no such backend, or one that needs a GPU without one.
        TransportUnavailable: this machine does not have it.
    """

    def __init__(self, count: int, cuda_device: int | None = None, backend: str = "pinned") -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
        if cuda_device is None and backend != "pinned":
            raise ConfigError(f"backend={backend!r}: maps GPU memory; cuda_device must be given")
        nbytes = max(count, 1) * FLAG_BYTES
        self._memory: Any
        if cuda_device is None:
            self._memory = Block(nbytes)
            host = device = self._memory.address
        else:
            self._memory = _KINDS[backend](nbytes, cuda_device)
            host, device = self._memory.host, self._memory.device
        self._all = [
            HostFlag(host + n * FLAG_BYTES, device + n * FLAG_BYTES, self._memory)
            for n in range(count)
        ]

    def __getitem__(self, index: int) -> HostFlag:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)


class _Pinned:
    """Host memory that all GPUs map at the same address."""

    def __init__(self, nbytes: int, cuda_device: int) -> None:
        from moecomm.cuda_driver import call, current, driver

        self._cuda = driver()
        self._index = cuda_device
        with current(cuda_device):
            self.host = int(call(self._cuda.cuMemHostAlloc, nbytes, _PORTABLE_MAPPED))
            self.device = int(call(self._cuda.cuMemHostGetDevicePointer, self.host, 0))
        ctypes.memset(self.host, 0, nbytes)
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A worker that is still running holds a flag, and that holds this.
        if getattr(self, "_pid", None) == os.getpid():
            self._cuda.cuMemFreeHost(self.host)


class _OnGpu:
    """A page of GPU memory for the others to map."""

    def __init__(self, nbytes: int, cuda_device: int) -> None:
        from moecomm.cuda_driver import call, current, driver

        self._cuda = driver()
        size = -(-nbytes // _GPU_PAGE) * _GPU_PAGE
        with current(cuda_device):
            self._raw = int(call(self._cuda.cuMemAlloc, size + _GPU_PAGE))
            self.device = -(-self._raw // _GPU_PAGE) * _GPU_PAGE
            call(self._cuda.cuMemsetD8, self.device, 0, size)
            call(self._cuda.cuCtxSynchronize)
        self.size = size
        self._pid = os.getpid()

    def free(self) -> None:
        """Give the memory back."""
        if getattr(self, "_pid", None) == os.getpid():
            self._cuda.cuMemFree(self._raw)


class _DmaBuf(_OnGpu):
    """The page, through a DMA-BUF file descriptor."""

    def __init__(self, nbytes: int, cuda_device: int) -> None:
        from moecomm.cuda_driver import DriverError, call, current, driver

        version = int(call(driver().cuDriverGetVersion))
        if version < _DMABUF_DRIVER:
            raise TransportUnavailable(
                f"backend='dmabuf': needs a driver of CUDA 13.3, this one is of "
                f"{version // 1000}.{version % 1000 // 10}: use 'pinned'"
            )
        super().__init__(nbytes, cuda_device)
        try:
            with current(cuda_device):
                kind = self._cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
                fd = int(
                    call(
                        self._cuda.cuMemGetHandleForAddressRange,
                        self.device, self.size, kind, 0,
                    )
                )  # fmt: skip
            try:
                self._map = mmap.mmap(fd, self.size, mmap.MAP_SHARED)
            finally:
                os.close(fd)
        except (DriverError, OSError) as error:
            self.free()
            raise TransportUnavailable(f"backend='dmabuf': {error}: use 'pinned'") from error
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.host = ctypes.addressof(self._anchor)

    def __del__(self) -> None:
        self.free()


class _Gdr(_OnGpu):
    """The page, mapped by GDRCopy."""

    def __init__(self, nbytes: int, cuda_device: int) -> None:
        try:
            self._gdr = ctypes.CDLL("libgdrapi.so.2")
            self._gdr.gdr_open.restype = ctypes.c_void_p
            self._handle = self._gdr.gdr_open()
        except OSError as error:
            raise TransportUnavailable(f"backend='gdr': {error}: use 'pinned'") from error
        if not self._handle:
            raise TransportUnavailable(
                "backend='gdr': gdr_open failed; is the module gdrdrv loaded? Use 'pinned'"
            )
        super().__init__(nbytes, cuda_device)
        page, where = ctypes.c_ulong(0), ctypes.c_void_p()
        gdr, handle = self._gdr, ctypes.c_void_p(self._handle)
        device, size = ctypes.c_ulong(self.device), ctypes.c_size_t(self.size)
        code = gdr.gdr_pin_buffer(
            handle, device, size, ctypes.c_uint64(0), ctypes.c_uint32(0), ctypes.byref(page)
        )
        code = code or gdr.gdr_map(handle, page, ctypes.byref(where), size)
        if code != 0:
            self.free()
            raise TransportUnavailable(f"backend='gdr': cannot map GPU memory ({code})")
        self.host = int(where.value or 0)
        self._page = page

    def __del__(self) -> None:
        if hasattr(self, "_page"):
            handle, size = ctypes.c_void_p(self._handle), ctypes.c_size_t(self.size)
            self._gdr.gdr_unmap(handle, self._page, ctypes.c_void_p(self.host), size)
            self._gdr.gdr_unpin_buffer(handle, self._page)
            self.free()


_KINDS: Final = {"pinned": _Pinned, "gdr": _Gdr, "dmabuf": _DmaBuf}
