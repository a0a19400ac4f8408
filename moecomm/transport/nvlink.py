"""NVLink (or PCIe) between the GPUs of one machine: peers' memory mapped, no library in between.

Every rank makes its memory with the driver's virtual memory functions and passes a file
descriptor for it to the others, which map it. No root, no NIC and no NVSHMEM are needed, several
ranks may share a GPU, and ``CUDA_VISIBLE_DEVICES`` may differ between ranks.
"""

from __future__ import annotations

import logging
import os

from moecomm.errors import MoecommError, TransportError
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport import gpu_pages
from moecomm.transport.descriptors import Mailbox, close_all
from moecomm.transport.gpu_memory import GpuMemory, release_all
from moecomm.transport.gpu_pages import GpuPages
from moecomm.transport.gpu_survey import survey

logger = logging.getLogger(__name__)


class NvlinkMemory(GpuMemory):
    """``Memory`` on GPUs of one machine; ranks are processes, or threads of them.

    Constructing is collective: the GPUs are compared before anything is allocated.

    Args: as ``GpuMemory``.

    Raises:
        TransportUnavailable: see ``survey``; on every rank.
        PeerTimeout: a rank did not come.
    """

    transport = "nvlink"
    shareable = True

    def __init__(self, group: Group, index: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(group, index, timeout_s=timeout_s)
        self._mailbox = Mailbox(group.rank)
        try:
            self.seats = survey(self._group, index, timeout_s, self._mailbox)
        except BaseException:
            self.close()
            raise
        gpus = len({seat.uuid for seat in self.seats})
        logger.info("rank %d: %d ranks on %d GPUs", group.rank, group.size, gpus)

    def close(self) -> None:
        """See ``Memory.close``. What peers have mapped stays theirs until they close."""
        super().close()
        self._mailbox.close()

    def _get_pages(self, pages: dict[int, GpuPages]) -> None:
        mine = pages[self._group.rank]
        peers = [(s.mailbox[0], bytes.fromhex(s.mailbox[1])) for s in self.seats]
        fd = mine.export(self._index)
        try:
            fds = self._mailbox.exchange(fd, peers, self._timeout_s)
        finally:
            os.close(fd)  # the kernel keeps what is under way
        try:
            for rank, theirs in fds.items():
                pages[rank] = self._import(rank, theirs, mine.nbytes)
        finally:
            close_all(fds)

    def _let_go(self, pages: dict[int, GpuPages]) -> None:
        release_all(pages)

    def _import(self, rank: int, fd: int, nbytes: int) -> GpuPages:
        try:
            return gpu_pages.import_from(self._index, fd, nbytes)
        except MoecommError as error:
            mine, theirs = self.seats[self._group.rank], self.seats[rank]
            raise TransportError(
                f"{mine.name} ({mine.uuid}) cannot map the memory of rank {rank} on "
                f"{theirs.name} ({theirs.uuid}): {error}",
                transport=self.transport,
                peer=rank,
                operation="allocate",
            ) from error


def open_memory(group: Group, index: int) -> NvlinkMemory:
    """What ``moecomm.transport.open_memory("nvlink", group, ("cuda", index))`` returns."""
    return NvlinkMemory(group, index)
