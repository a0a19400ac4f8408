"""A GPU: compiled kernels; peers are other ranks of this process on GPUs it sees.

Ranks in several processes need the transports that map a peer's memory, which this version does
not have; it refuses them.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
from typing import Final

from moecomm import cuda_driver
from moecomm.arrays import Device
from moecomm.cuda_driver import DeviceMemory, PinnedMemory
from moecomm.errors import TransportUnavailable
from moecomm.group import Group
from moecomm.kernels.args import STATUS_BYTES, Args, Status
from moecomm.kernels.gpu import GpuKernels
from moecomm.layout import Layout

# What ranks of this process let each other write to. A rank that closes lets go of its own part;
# the part lives on until the peers that may still write to it have closed too.
_SYMMETRIC: Final[weakref.WeakValueDictionary[int, DeviceMemory]] = weakref.WeakValueDictionary()


class CudaRuntime:
    """One rank on GPU ``index``."""

    synchronous = False

    def __init__(self, layout: Layout, group: Group, transport: str, index: int) -> None:
        if transport not in ("auto", "loopback"):
            raise TransportUnavailable(
                f"transport={transport!r} on a GPU is not part of this version; 'loopback' joins "
                "ranks that are threads of one process"
            )
        self._layout = layout
        self._index = index
        self.device: Device = ("cuda", index)
        self._kernels = GpuKernels(layout, index)
        self._symmetric = DeviceMemory(index, layout.symmetric.nbytes)
        self._local = DeviceMemory(index, layout.local.nbytes)
        self._status = PinnedMemory(index, STATUS_BYTES)
        self._connect(group)
        self.memory_bytes = layout.symmetric.nbytes + layout.local.nbytes

    @property
    def local(self) -> int:
        return self._local.address

    @property
    def symmetric(self) -> int:
        return self._symmetric.address

    @property
    def status_address(self) -> int:
        return self._status.address

    @property
    def owner(self) -> object:
        return self._local

    def launch(
        self, stage: str, args: Args, num_tokens: int, input_code: int, stream: int | None
    ) -> None:
        cuda_driver.make_current(self._index)
        where = _current_stream(self._index) if stream is None else stream
        self._kernels.launch(stage, args, num_tokens, input_code, where)

    def statuses(self) -> list[Status]:
        return list((Status * 3).from_address(self._status.address))

    def read_words(self, region: str) -> list[int]:
        cuda_driver.make_current(self._index)
        cuda_driver.call(cuda_driver.driver().cuCtxSynchronize)
        where = self._layout.local[region]
        data = cuda_driver.copy_from_device(self.local + where.offset, where.nbytes)
        return list(struct.unpack(f"<{where.nbytes // 8}Q", data))

    def close(self) -> None:
        """Received arrays keep the workspace alive; everything else goes."""
        cuda_driver.make_current(self._index)
        cuda_driver.call(cuda_driver.driver().cuCtxSynchronize)
        self._kernels.close()
        self._peers.clear()
        self._status.close()

    def _connect(self, group: Group) -> None:
        """Swap addresses, which mean the same to all ranks of one process."""
        _SYMMETRIC[self.symmetric] = self._symmetric
        mine = struct.pack("<QQ", os.getpid(), self.symmetric)
        everyone = [
            struct.unpack("<QQ", blob)
            for blob in group.all_gather(mine, self._layout.cfg.timeout_s)
        ]
        if len({pid for pid, _ in everyone}) > 1:
            raise TransportUnavailable(
                "ranks on GPUs in several processes: not part of this version; use device='cpu'"
            )
        peers = struct.pack(f"<{group.size}Q", *(address for _, address in everyone))
        self._peers = [_SYMMETRIC[address] for _, address in everyone]
        cuda_driver.make_current(self._index)
        cuda_driver.copy_to_device(self.local + self._layout.local["peers"].offset, peers)


def _current_stream(index: int) -> int:
    """torch's current stream where torch is in use, else the legacy default stream."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_stream(index).cuda_stream) if torch is not None else 0
