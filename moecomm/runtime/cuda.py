"""A GPU: compiled kernels, memory that peers map, halves on the caller's streams."""

from __future__ import annotations

import contextlib
import logging
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moecomm import cuda_driver, env
from moecomm.agreement import SETUP_S, together
from moecomm.arena import Arena
from moecomm.arrays import Device, Kind
from moecomm.cuda_driver import PinnedMemory, call, current
from moecomm.errors import TransportError
from moecomm.group import Group
from moecomm.kernels.args import STATUS_BYTES, ArgBlock, Status
from moecomm.kernels.gpu import GpuKernels
from moecomm.kernels.numba_jit.sources import Sources
from moecomm.kernels.nvshmem_link import find_copy
from moecomm.kernels.stages import has_bounce
from moecomm.layout import Layout
from moecomm.runtime.base import POISON
from moecomm.runtime.bounce import Bounce
from moecomm.runtime.devices import choose_index
from moecomm.runtime.streams import Streams
from moecomm.transport import NETWORKS, gpu_pages, open_gpu_memory
from moecomm.transport.base import Region
from moecomm.transport.engine import topology
from moecomm.transport.gpu_memory import GpuMemory
from moecomm.transport.hybrid import HybridGpuMemory
from moecomm.transport.nodes import find_nodes
from moecomm.transport.nvshmem import NvshmemMemory

if TYPE_CHECKING:
    from moecomm.transport.proxy.mover import Mover

logger = logging.getLogger(__name__)


class CudaRuntime:
    """One rank on GPU ``index``; ``None``: see ``choose_index``. Constructing is collective."""

    synchronous = False
    remote_flags = 0
    remote_bulk = 0
    network_bulk = 0
    _mover: Mover | None = None
    _wake: Callable[[], object] | None = None
    _image: gpu_pages.GpuPages | None = None
    stream: Callable[[Any, Kind], int]  # Streams.find, without a call between

    def __init__(
        self,
        layout: Layout,
        group: Group,
        transport: str,
        index: int | None,
        sources: Sources | None = None,
    ) -> None:
        timeout_s = max(layout.cfg.timeout_s, SETUP_S)
        self._sources = sources
        self._layout = layout
        self._group = group
        self._closed = False
        self._undo = contextlib.ExitStack()
        self.owner: object = None
        self._index = together(
            group, "device", lambda: choose_index(group, index, timeout_s), timeout_s
        )
        self.device: Device = ("cuda", self._index)
        uuid = cuda_driver.device_uuid(self._index).encode()
        self._shared = len(set(group.all_gather(uuid, timeout_s))) < group.size
        try:
            together(group, "load", self._load, timeout_s)
            self._memory = self._open_memory(transport)
            self._undo.callback(self._memory.close)
            self._allocate()
            if self._puts:
                self._introduce_modules()
            if self._proxied:
                together(group, "pin", self._pin, timeout_s)
            self._prepare()
            if self._proxied:
                self._start_mover(transport)
        except BaseException:
            self.close()
            raise
        self.memory_bytes = self._memory.taken_bytes + self._workspace_bytes

    def join(self, earlier: int, later: int) -> None:
        self._streams.join(earlier, later)

    def launch(
        self,
        stage: str,
        block: ArgBlock,
        num_tokens: int,
        input_code: int,
        stream: int,
        stream_object: object = None,
    ) -> None:
        if stream != self._streams.last:
            self._streams.enter(stream, stream_object)
        self._launch(stage, block, num_tokens, input_code, stream)

    def statuses(self) -> list[Status]:
        return self._statuses

    def read_words(self, region: str) -> list[int]:
        cuda_driver.synchronize(self._index)
        where = self._layout.local[region]
        data = cuda_driver.copy_from_device(self._index, self.local + where.offset, where.nbytes)
        return list(struct.unpack(f"<{where.nbytes // 8}Q", data))

    def failure(self) -> TransportError | None:
        return None if self._mover is None else self._mover.failure()

    def close(self) -> None:
        """Received arrays keep the workspace alive; everything else goes."""
        if self._closed:
            return
        self._closed = True
        if self._wake is not None:
            self._wake()
        with self._undo:
            cuda_driver.synchronize(self._index)
        self.owner = self._image = None

    def _load(self) -> bool:
        """What concerns this rank alone."""
        layout, index = self._layout, self._index
        self._kernels = self._make_kernels()
        self._launch: Any = self._kernels.launch
        self._undo.callback(self._kernels.close)
        self._streams = Streams(index)
        self._undo.callback(self._streams.close)
        self.stream = self._streams.find
        pages = gpu_pages.make(index, layout.local.nbytes, shareable=False)
        self.owner = pages
        self._workspace_bytes, self.local = pages.nbytes, pages.address
        self._status = PinnedMemory(index, STATUS_BYTES)
        self._undo.callback(self._status.close)
        self.status_address = self._status.address
        self._statuses = list((Status * 3).from_address(self.status_address))
        return True

    def _make_kernels(self) -> GpuKernels:
        if self._sources is None:
            link = find_copy().link if self._puts else ()
            # Push and pull must find room beside what waits for them.
            shared = self._shared or has_bounce(self._layout)
            return GpuKernels(self._layout, self._index, link, shared=shared)
        from moecomm.kernels.numba_jit.gpu import GpuPythonKernels

        return GpuPythonKernels(self._layout, self._index, self._sources)

    def _open_memory(self, transport: str) -> GpuMemory | HybridGpuMemory:
        """Over NVLink where ranks are of one machine; a network joins the rest."""
        if transport not in NETWORKS:
            return open_gpu_memory(transport, self._group, self._index)
        timeout_s = max(self._layout.cfg.timeout_s, SETUP_S)
        nodes = find_nodes(self._group, timeout_s)
        return HybridGpuMemory(self._group, nodes, self._index, timeout_s)

    def _pin(self) -> bool:
        """What the mover works on: memory of the host, so that any network interface can reach it;
        and the image of it that the stages work on, in the GPU's own."""
        areas = self._layout.areas
        assert areas is not None
        self._pinned = [PinnedMemory(self._index, arena.nbytes) for arena in areas.arenas]
        self._undo.callback(self._unpin)
        self.remote_flags, self.network_bulk = (part.address for part in self._pinned)
        self._image = gpu_pages.make(self._index, areas.bulk.nbytes, shareable=False)
        self._workspace_bytes += self._image.nbytes
        self.remote_bulk = self._image.address
        bounce = Bounce(self._index, self._layout, self._kernels, self._streams, self.remote_flags)
        self._undo.callback(bounce.close)
        self._launch = bounce.launch
        return True

    def _unpin(self) -> None:
        if self._mover is not None and not self._mover.stopped:
            return  # its engine hangs in a library call, and may yet touch the memory
        for part in self._pinned:
            part.close()

    @property
    def _proxied(self) -> bool:
        """Whether a mover serves the ranks of other nodes."""
        return isinstance(self._memory, HybridGpuMemory) and self._layout.areas is not None

    def _start_mover(self, transport: str) -> None:
        from moecomm.runtime.proxied import start_mover

        areas, memory = self._layout.areas, self._memory
        assert areas is not None
        assert isinstance(memory, HybridGpuMemory)
        flags, bulk = (
            Region(part.address, arena.nbytes)
            for part, arena in zip(self._pinned, areas.arenas, strict=True)
        )
        near = topology.cpus_near(topology.pci_address_of(self._index))
        self._mover = start_mover(
            self._layout, self._group, transport, memory.nodes, (flags, bulk), cpus=near or None
        )
        # What pull may yet touch beside, too: a communicator that nobody closes keeps it.
        self._mover.hold(*self._pinned, self._image, self.owner)
        self._undo.callback(self._mover.close)
        # Also where nobody closes this, and when the process ends: the driver may wait for streams.
        self._wake = weakref.finalize(self, self._mover.wake_streams)
        logger.info(
            "rank %d: bytes for other nodes go through %d MiB of pinned host memory",
            self._group.rank,
            bulk.nbytes >> 20,
        )

    def _prepare(self) -> None:
        """Tell kernels where the peers are."""
        ranks = range(self._group.size)
        if env.flag("POISON"):
            self._poison(self.symmetric, self._layout.symmetric)
            self._poison(self.local, self._layout.local)
            if self._layout.areas is not None:
                for bulk in {self.remote_bulk, self.network_bulk}:
                    self._poison(bulk, self._layout.areas.bulk)
        pointers = [self._memory.peer_pointer(rank, self._region) or 0 for rank in ranks]
        self._write_words("peers", pointers)
        if isinstance(self._memory, NvshmemMemory) and self._puts:
            heaps = [self._memory.heap_pointer(rank, self._region) or 0 for rank in ranks]
            self._write_words("remote_base", heaps)

    def _allocate(self) -> None:
        """What peers write to; with puts also what they are made from, in one part of the heap."""
        areas, sizes = self._layout.areas, [self._layout.symmetric.nbytes]
        if areas is not None and self._puts:
            sizes += [areas.flags.nbytes, areas.bulk.nbytes]
        self._region = self._memory.allocate(sum(sizes))
        self.symmetric = self._region.address
        if areas is not None and self._puts:
            self.remote_flags = self.symmetric + sizes[0]
            self.remote_bulk = self.network_bulk = self.remote_flags + sizes[1]

    def _introduce_modules(self) -> None:
        """NVSHMEM fills in the device code's state, and lets go of it before it is unloaded."""
        memory = self._memory
        assert isinstance(memory, NvshmemMemory)
        for module in self._kernels.modules:
            memory.module_init(module)
            self._undo.callback(memory.module_finalize, module)

    @property
    def _puts(self) -> bool:
        """Whether kernels put with NVSHMEM."""
        return self._layout.remote is not None and self._layout.remote.mode == "nvshmem"

    def _write_words(self, region: str, words: list[int]) -> None:
        where = self.local + self._layout.local[region].offset
        cuda_driver.copy_to_device(self._index, where, struct.pack(f"<{len(words)}Q", *words))

    def _poison(self, base: int, arena: Arena) -> None:
        with current(self._index) as cu:
            for region in arena:
                if region.poison and region.nbytes:
                    call(cu.cuMemsetD8, base + region.offset, POISON, region.nbytes)
            call(cu.cuCtxSynchronize)
