"""A CUDA driver without a GPU: memory that processes really share, contexts, a log of launches.

Stands in for ``cuda.bindings.driver``. Physical memory is a memfd, so that exporting, passing and
mapping it are the real thing between real processes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moecomm import cuda_driver
from moecomm.kernels.args import Args

GRANULARITY = 2 << 20
ATTRIBUTES = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "MULTIPROCESSOR_COUNT": 8,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10
_NO_ACCESS, _READ_WRITE = 0, 3


@dataclass
class FakeGpu:
    """``closed``: UUIDs of GPUs whose memory it cannot access."""

    uuid: str
    name: str = "NVIDIA Fake"
    free: int = 1 << 30
    closed: tuple[str, ...] = ()
    attributes: dict[str, int] = field(default_factory=dict)


DEFAULT_STREAMS = (0, 1, 2)  # the current context's


class FakeFunction(str):
    """A kernel's name, with the context that it was loaded in."""

    context: int

    def __new__(cls, name: str, context: int) -> FakeFunction:
        self = super().__new__(cls, name)
        self.context = context
        return self


class FakeDriver:
    """``fail``: names of functions that report an invalid value instead of working."""

    def __init__(self, gpus: list[FakeGpu], fail: tuple[str, ...] = ()) -> None:
        self.real = importlib.import_module("cuda.bindings.driver")
        self.gpus = gpus
        self.fail = set(fail)
        self.live: Counter[str] = Counter()  # what has been taken and not given back
        self.launches: list[tuple[Any, ...]] = []
        # Kernels launched with programmatic serialization, and their streams.
        self.started_early: set[tuple[str, int]] = set()
        self.log: list[tuple[Any, ...]] = []  # events and waits
        self.queued: list[
            tuple[Any, ...]
        ] = []  # all that has been put on streams: what, stream ...
        self.capturing: set[int] = set()
        self.home: int | None = None  # where default streams must be meant, if that is looked at
        self._handles: dict[int, tuple[int, int, int]] = {}  # handle → fd, nbytes, GPU
        self._threads = threading.local()
        self._next = 100

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AssertionError(f"the fake driver has no {name}")
        return getattr(self.real, name)

    # ---- devices and contexts ------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._ok()

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._ok(len(self.gpus))

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._ok(self.real.CUdevice(index))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        self.log.append(("context", int(device)))
        return self._ok(self.real.CUcontext(1000 + int(device)))

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._ok(self.real.CUcontext(self._contexts[-1] if self._contexts else 0))

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self._contexts.append(int(context))
        return self._ok()

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self._ok(self.real.CUcontext(self._contexts.pop()))

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self._contexts[:] = [int(context)]
        return self._ok()

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return self._ok(self.real.CUdevice(self._contexts[-1] - 1000))

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        assert self._contexts, "no current context"
        return self._catch_up()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert (stream, bool(self._contexts)) == (0, True), "nobody else asks for that"
        return self._catch_up()

    def cuDeviceGetAttribute(self, key: Any, device: Any) -> tuple[Any, ...]:
        table = {**ATTRIBUTES, **self.gpus[int(device)].attributes}
        keys = {n: getattr(type(key), f"CU_DEVICE_ATTRIBUTE_{n}") for n in table}
        return self._ok(next(table[name] for name, known in keys.items() if known == key))

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, ...]:
        return self._ok(self.gpus[int(device)].name.encode().ljust(length, b"\0"))

    def cuDeviceGetUuid(self, device: Any) -> tuple[Any, ...]:
        class Uuid:
            bytes = self.gpus[int(device)].uuid.encode().ljust(16, b"\0")

        return self._ok(Uuid)

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceCanAccessPeer(self, device: Any, other: Any) -> tuple[Any, ...]:
        closed = self.gpus[int(device)].closed
        return self._ok(int(self.gpus[int(other)].uuid not in closed))

    # ---- memory --------------------------------------------------------------------------

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._ok(self.gpus[self._contexts[-1] - 1000].free, 1 << 31)

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        return self._ok(GRANULARITY)

    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> tuple[Any, ...]:
        assert nbytes % GRANULARITY == 0
        gpu = self.gpus[prop.location.id]
        if nbytes > gpu.free:
            return (self.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        fd = os.memfd_create("fake GPU", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        gpu.free -= nbytes
        return self._ok(self._new_handle(fd, nbytes, prop.location.id))

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[Any, ...]:
        if "cuMemExportToShareableHandle" in self.fail:
            return self._refuse()
        return self._ok(os.dup(self._handles[handle][0]))

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> tuple[Any, ...]:
        if "cuMemImportFromShareableHandle" in self.fail:
            return self._refuse()
        return self._ok(self._new_handle(os.dup(fd), 0, -1))

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        fd, nbytes, index = self._handles.pop(handle)
        os.close(fd)
        if index >= 0:
            self.gpus[index].free += nbytes
        self.live["handle"] -= 1
        return self._ok()

    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, ...]:
        self.live["address"] += 1
        return self._ok(_map(None, nbytes, _NO_ACCESS, _ANONYMOUS, -1))

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[Any, ...]:
        fd = self._handles[handle][0]
        _map(address, nbytes, _NO_ACCESS, mmap.MAP_SHARED | _FIXED, fd)
        self.live["mapping"] += 1
        return self._ok()

    def cuMemSetAccess(
        self, address: int, nbytes: int, wanted: list[Any], count: int
    ) -> tuple[Any, ...]:
        if "cuMemSetAccess" in self.fail:
            return self._refuse()
        assert len(wanted) == count
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _READ_WRITE)
        self.log.append(("access", address, [w.location.id for w in wanted]))
        return self._ok()

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        _map(address, nbytes, _NO_ACCESS, _ANONYMOUS | _FIXED, -1)
        self.live["mapping"] -= 1
        return self._ok()

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert _libc.munmap(address, nbytes) == 0
        self.live["address"] -= 1
        return self._ok()

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:
        return self._queue(lambda: ctypes.memset(address, value, nbytes))

    def cuMemcpyHtoD(self, address: int, data: bytes, nbytes: int) -> tuple[Any, ...]:
        """Of pageable memory the first 64 KiB may have been read, and not be there yet."""
        read = bytes(data[:nbytes])
        return self._queue(lambda: ctypes.memmove(address, read, nbytes))

    def cuMemcpyDtoH(self, data: bytearray, address: int, nbytes: int) -> tuple[Any, ...]:
        self._catch_up()
        data[:] = ctypes.string_at(address, nbytes)
        return self._ok()

    def _queue(self, work: Callable[[], object]) -> tuple[Any, ...]:
        """On the default stream, which comes to it when somebody waits for that."""
        self._late.append(work)
        return self._ok()

    def _catch_up(self) -> tuple[Any, ...]:
        while self._late:
            self._late.pop(0)()
        return self._ok()

    @property
    def _late(self) -> list[Callable[[], object]]:
        """What this thread, which is a rank, has queued there."""
        late: list[Callable[[], object]] = self._threads.__dict__.setdefault("late", [])
        return late

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        self.live["pinned"] += 1
        return self._ok(_map(None, nbytes, _READ_WRITE, _ANONYMOUS, -1))

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        self.live["pinned"] -= 1
        return self._ok()

    # ---- modules, streams, launches --------------------------------------------------------

    def cuModuleLoad(self, path: bytes) -> tuple[Any, ...]:
        self.live["module"] += 1
        return self._ok(path)

    def cuModuleUnload(self, module: bytes) -> tuple[Any, ...]:
        self.live["module"] -= 1
        return self._ok()

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        return self._ok(FakeFunction(name.decode(), self._contexts[-1]))

    def cuFuncSetAttribute(self, function: Any, name: Any, value: int) -> tuple[Any, ...]:
        self.log.append(("attribute", function, name.name, value))
        return self._ok()

    def cuFuncLoad(self, function: Any) -> tuple[Any, ...]:
        self.log.append(("load", function))
        return self._ok()

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        self.live["event"] += 1
        self._next += 1
        return self._ok(self._next)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        self.live["event"] -= 1
        return self._ok()

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        if self._is_elsewhere(int(stream), self.home):
            return self._refuse_elsewhere()
        self.log.append(("record", int(stream)))
        self.queued.append(("record", int(stream), event))
        return self._ok()

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        if self._is_elsewhere(int(stream), self.home):
            return self._refuse_elsewhere()
        self.log.append(("wait", int(stream)))
        self.queued.append(("wait", int(stream), event))
        return self._ok()

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return self._ok(0, -5)

    def cuStreamCreateWithPriority(self, flags: Any, priority: int) -> tuple[Any, ...]:
        assert flags == self.real.CUstream_flags.CU_STREAM_NON_BLOCKING
        assert priority == -5
        self.live["stream"] += 1
        self._next += 1
        return self._ok(self._next)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.live["stream"] -= 1
        return self._ok()

    def cuStreamWaitValue64(
        self, stream: int, address: int, value: int, flags: Any
    ) -> tuple[Any, ...]:
        self.queued.append(("wait for", int(stream), address, value, flags.name))
        return self._ok()

    def cuStreamIsCapturing(self, stream: Any) -> tuple[Any, ...]:
        if self._is_elsewhere(int(stream), self.home):
            return self._refuse_elsewhere()
        status = self.real.CUstreamCaptureStatus
        name = "ACTIVE" if int(stream) in self.capturing else "NONE"
        return self._ok(getattr(status, f"CU_STREAM_CAPTURE_STATUS_{name}"))

    def cuLaunchKernelEx(
        self, config: Any, function: Any, pointers: int, _: int
    ) -> tuple[Any, ...]:
        shape = (config.gridDimX, config.gridDimY, config.gridDimZ)
        shape += (config.blockDimX, config.blockDimY, config.blockDimZ)
        address = ctypes.c_void_p.from_address(pointers).value
        stream = int(config.hStream)
        assert not self._late, "kernels of other streams may see memory as it was before"
        # As seen on H200s, 2026-11-30, of stream 0 and of others; 1 and 2 are assumed.
        if self._is_elsewhere(stream, function.context):
            return self._refuse_elsewhere()
        self.launches.append((function, shape, config.sharedMemBytes, stream, address))
        bounces = function.endswith(("_push", "_pull"))
        ticket = (Args.from_address(address).beside,) if bounces else ()
        self.queued.append((function, stream, *ticket))
        if config.numAttrs:
            self.started_early.add((function, stream))
        return self._ok()

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _contexts(self) -> list[int]:
        if not hasattr(self._threads, "contexts"):
            self._threads.contexts = []
        return self._threads.contexts

    def _is_elsewhere(self, stream: int, context: int | None) -> bool:
        """Whether ``stream`` means one of another context than ``context``."""
        return stream in DEFAULT_STREAMS and context not in (None, *self._contexts[-1:])

    def _refuse_elsewhere(self) -> tuple[Any, ...]:
        errors = self.real.CUresult
        if self._contexts:
            return (errors.CUDA_ERROR_INVALID_HANDLE,)
        return (errors.CUDA_ERROR_INVALID_CONTEXT,)

    def _ok(self, *values: Any) -> tuple[Any, ...]:
        return (self.real.CUresult.CUDA_SUCCESS, *values)

    def _refuse(self) -> tuple[Any, ...]:
        return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def _new_handle(self, fd: int, nbytes: int, index: int) -> int:
        self._next += 1
        self._handles[self._next] = fd, nbytes, index
        self.live["handle"] += 1
        return self._next


@contextmanager
def installed(driver: FakeDriver) -> Iterator[FakeDriver]:
    """Let the package use ``driver``."""
    before, cuda_driver.MODULE = cuda_driver.MODULE, "played_cuda_driver"
    sys.modules[cuda_driver.MODULE] = driver  # type: ignore[assignment]
    _forget()
    try:
        yield driver
    finally:
        gc.collect()  # what errors hold on to is let go of by this driver
        del sys.modules[cuda_driver.MODULE]
        cuda_driver.MODULE = before
        _forget()


def _forget() -> None:
    cuda_driver.driver.cache_clear()
    cuda_driver.device.cache_clear()
    cuda_driver.context.cache_clear()


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)
