"""DMA-BUF descriptors of GPU memory: how a device's driver gets at it without nvidia-peermem."""

from __future__ import annotations

import logging
import mmap
from typing import NamedTuple

from moecomm.cuda_driver import attribute, call, current
from moecomm.errors import MoecommError

logger = logging.getLogger(__name__)


class DmaBuf(NamedTuple):
    """An open file descriptor, which its holder closes, and where in it the range begins."""

    fd: int
    offset: int


def export(index: int, address: int, nbytes: int) -> DmaBuf | None:
    """A DMA-BUF of ``nbytes`` at ``address`` on GPU ``index``, in whole pages; ``None`` where the
    driver, or the way the memory was made, does not allow one."""
    offset = address % mmap.PAGESIZE
    pages = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        if not attribute(index, "DMA_BUF_SUPPORTED"):
            return None
        with current(index) as cu:
            kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            fd = call(cu.cuMemGetHandleForAddressRange, address - offset, pages, kind, 0)
    except MoecommError as error:
        logger.info("GPU %d: no DMA-BUF of %d bytes at %#x: %s", index, nbytes, address, error)
        return None
    return DmaBuf(int(fd), offset)
