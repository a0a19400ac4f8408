"""GPU memory by the driver's virtual memory functions: made here, or imported from a peer.

The driver counts references to physical memory, in all processes: it stays until the last handle
is released and the last mapping is gone. So owners and peers may let go in any order.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from moecomm.cuda_driver import OUT_OF_MEMORY, DriverError, call, current, device, free_bytes
from moecomm.errors import OutOfMemory


def make(index: int, nbytes: int, *, shareable: bool = True) -> GpuPages:
    """At least ``nbytes`` of zeroed memory on the device; ``shareable``: for other processes too.

    Raises:
        OutOfMemory: the device has not so much left.
    """
    with current(index) as cu:
        properties = _properties(cu, index, shareable)
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(call(cu.cuMemGetAllocationGranularity, properties, minimum))
        padded = -(-nbytes // step) * step
        try:
            handle = call(cu.cuMemCreate, padded, properties, 0)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(padded, free_bytes(index), f"GPU {index}") from error
        pages = GpuPages(index, handle, padded)
        call(cu.cuMemsetD8, pages.address, 0, padded)
        call(cu.cuCtxSynchronize)
    return pages


def import_from(index: int, fd: int, nbytes: int) -> GpuPages:
    """What a peer has exported as file descriptor ``fd`` (it stays open), for GPU ``index``."""
    with current(index) as cu:
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call(cu.cuMemImportFromShareableHandle, fd, kind)
        return GpuPages(index, handle, nbytes)


class GpuPages:
    """``nbytes`` of physical memory at ``address``, where GPU ``index`` loads and stores it.

    Unmapped when the last reference to this object goes, or by ``close``.
    """

    def __init__(self, index: int, handle: Any, nbytes: int) -> None:
        """Takes ``handle`` over, also when mapping fails."""
        self.nbytes = nbytes
        self._handle = handle
        undo: list[tuple[str, tuple[Any, ...]]] = [("cuMemRelease", (handle,))]
        with current(index) as cu:
            try:
                address = call(cu.cuMemAddressReserve, nbytes, 0, 0, 0)
                undo.append(("cuMemAddressFree", (address, nbytes)))
                call(cu.cuMemMap, address, nbytes, 0, handle, 0)
                undo.append(("cuMemUnmap", (address, nbytes)))
                self.address = int(address)
                self.allow([index])
            except DriverError:
                _undo(index, undo)
                raise
        self._finalizer = weakref.finalize(self, _undo, index, undo)
        self._finalizer.atexit = False  # the driver cleans up after a process

    def allow(self, indices: Sequence[int]) -> None:
        """Let kernels on GPUs ``indices`` of this process load and store here, too."""
        with current(indices[0]) as cu:
            wanted = []
            for index in indices:
                access = cu.CUmemAccessDesc()
                access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = int(device(index))
                access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                wanted.append(access)
            call(cu.cuMemSetAccess, self.address, self.nbytes, wanted, len(wanted))

    def export(self, index: int) -> int:
        """A new file descriptor that stands for the memory; the caller closes it."""
        with current(index) as cu:
            kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            fd = int(call(cu.cuMemExportToShareableHandle, self._handle, kind, 0))
        os.set_inheritable(fd, False)
        return fd

    def close(self) -> None:
        """Unmap. Idempotent; nothing of this process may use the memory any more."""
        self._finalizer()


def _undo(index: int, steps: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Last things first. A step that fails must not keep the others from being taken."""
    failed: DriverError | None = None
    with current(index) as cu:
        for name, arguments in reversed(steps):
            try:
                call(getattr(cu, name), *arguments)
            except DriverError as error:
                failed = failed or error
    if failed is not None:
        raise failed


def _properties(cu: Any, index: int, shareable: bool) -> Any:
    found = cu.CUmemAllocationProp()
    found.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = int(device(index))
    if shareable:
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        found.requestedHandleTypes = kind
    return found
