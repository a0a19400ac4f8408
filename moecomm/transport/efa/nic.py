"""One libfabric endpoint as a ``Nic``: everything outside the hot path."""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Sequence
from typing import Final

from moecomm.errors import TransportError
from moecomm.transport.allocation import registration_hint
from moecomm.transport.base import Region
from moecomm.transport.efa import abi, hot
from moecomm.transport.efa.endpoint import Endpoint
from moecomm.transport.efa.fabrics import Fabric
from moecomm.transport.efa.library import Library, call, function, set_half, set_word, word
from moecomm.transport.efa.posting_state import Functions, PostingState
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.provider import Hooks, Limits, Registration, Sizing

_ACCESS: Final = (
    abi.FI_SEND | abi.FI_RECV | abi.FI_READ | abi.FI_WRITE
    | abi.FI_REMOTE_READ | abi.FI_REMOTE_WRITE
)  # fmt: skip


class FabricNic:
    """See ``Nic``.

    Args:
        library: the copy of libfabric that ``info`` is from.
        fabric: what was asked for.
        info: an ``fi_info``; this object's from now on.
        sizing: see ``Sizing``.
    """

    def __init__(self, library: Library, fabric: Fabric, info: int, sizing: Sizing) -> None:
        self._library = library
        self._fabric = fabric
        self._sizing = sizing
        self._mrs: dict[int, int] = {}  # by remote key
        self._keys = itertools.count(1)
        self._num_peers = 0
        self._end = Endpoint(library, fabric, info, sizing)
        self.device = self._end.device
        self.transport = self._end.transport
        try:
            self._lay_out()
        except BaseException:
            self.close()
            raise

    @property
    def limits(self) -> Limits:
        """See ``Nic.limits``."""
        return self._end.limits

    @property
    def hooks(self) -> Hooks:
        """See ``Nic.hooks``."""
        return Hooks(hot.POST, hot.POLL, self._posting.address)

    def address(self) -> bytes:
        """See ``Nic.address``."""
        return self._end.name

    def connect(self, peers: Sequence[bytes], timeout_s: float) -> None:
        """See ``Nic.connect``: into the address vector; nothing is said to the peers yet."""
        if self._num_peers + len(peers) > self._sizing.num_peers:
            raise TransportError(
                f"{self.device}: {self._num_peers + len(peers)} peers, was opened for "
                f"{self._sizing.num_peers}",
                transport=self.transport,
                operation="connect",
            )
        for address in peers:
            buffer = C.create_string_buffer(address, len(address))
            out = C.c_uint64(0)
            code = call(
                self._end.av, abi.AV_OPS, abi.AV_OPS_INSERT,
                C.addressof(buffer), 1, C.addressof(out), 0, 0,
            )  # fmt: skip
            if code != 1:
                raise TransportError(
                    f"{self.device}: fi_av_insert of peer {self._num_peers} failed: "
                    f"{self._library.strerror(code)} ({code})",
                    transport=self.transport,
                    peer=self._num_peers,
                    operation="connect",
                    code=-code,
                )
            self._posting.set_peer(self._num_peers, out.value)
            self._num_peers += 1

    def register(
        self, region: Region, *, on_gpu: bool = False, dmabuf_fd: int | None = None
    ) -> Registration:
        """See ``Nic.register``."""
        mr = self._regattr(region, on_gpu, dmabuf_fd)
        by_address = self._end.mr_mode & abi.FI_MR_VIRT_ADDR
        registration = Registration(
            local_key=word(mr, abi.MR_MEM_DESC),
            remote_key=word(mr, abi.MR_KEY),
            remote_base=region.address if by_address else 0,
        )
        self._mrs[registration.remote_key] = mr
        return registration

    def deregister(self, registration: Registration) -> None:
        """See ``Nic.deregister``."""
        mr = self._mrs.pop(registration.remote_key, None)
        if mr is not None:
            call(mr, abi.FID_OPS, abi.OPS_CLOSE)

    def explain(self, code: int, detail: int) -> str:
        """See ``Nic.explain``."""
        meaning = f"{self._library.strerror(code)} (fi_errno {code})"
        if not detail:
            return meaning
        said = C.create_string_buffer(256)
        kind = C.CFUNCTYPE(C.c_char_p, C.c_void_p, C.c_int, C.c_void_p, C.c_void_p, C.c_size_t)(
            function(self._end.cq, abi.CQ_OPS, abi.CQ_OPS_STRERROR)
        )
        more = kind(self._end.cq, C.c_int(detail).value, None, C.addressof(said), len(said))
        return f"{meaning}; provider's {detail}: {(more or b'').decode(errors='replace')}"

    def close(self) -> None:
        """See ``Nic.close``."""
        for mr in self._mrs.values():
            call(mr, abi.FID_OPS, abi.OPS_CLOSE)
        self._mrs.clear()
        self._end.close()

    # ---- Memory ---------------------------------------------------------------------------------

    def _regattr(self, region: Region, on_gpu: bool, dmabuf_fd: int | None) -> int:
        attr, iov, dmabuf = (
            Block(abi.MR_ATTR_BYTES), Block(abi.IOV_BYTES), Block(abi.DMABUF_BYTES),
        )  # fmt: skip
        set_word(iov.address, abi.IOV_BASE, region.address)
        set_word(iov.address, abi.IOV_LEN, region.nbytes)
        set_word(attr.address, abi.MR_ATTR_IOV, iov.address)
        set_word(attr.address, abi.MR_ATTR_IOV_COUNT, 1)
        set_word(attr.address, abi.MR_ATTR_ACCESS, _ACCESS)
        set_word(attr.address, abi.MR_ATTR_REQUESTED_KEY, next(self._keys))
        flags = 0
        if on_gpu:
            set_half(attr.address, abi.MR_ATTR_IFACE, abi.FI_HMEM_CUDA)
            set_half(attr.address, abi.MR_ATTR_DEVICE, self._sizing.cuda_device or 0)
        if dmabuf_fd is not None:
            set_half(dmabuf.address, abi.DMABUF_FD, dmabuf_fd)
            set_word(dmabuf.address, abi.DMABUF_LEN, region.nbytes)
            set_word(dmabuf.address, abi.DMABUF_BASE, region.address)
            set_word(attr.address, abi.MR_ATTR_IOV, dmabuf.address)
            flags = abi.FI_MR_DMABUF
        out = C.c_void_p()
        code = call(
            self._end.domain, abi.DOMAIN_MR, abi.MR_OPS_REGATTR,
            attr.address, flags, C.addressof(out),
        )  # fmt: skip
        if code != 0 or not out.value:
            where = f"GPU {self._sizing.cuda_device}" if on_gpu else "host memory"
            raise TransportError(
                f"{self.device} ({self.transport}): cannot register {region.nbytes} bytes of "
                f"{where} at {region.address:#x}: {self._library.strerror(code)} ({code})"
                + registration_hint(-code, region.nbytes, on_gpu=on_gpu),
                transport=self.transport,
                operation="register",
                code=-code,
            )
        return int(out.value)

    def _lay_out(self) -> None:
        depth = self._end.limits.tx_depth
        functions = Functions(
            writemsg=function(self._end.ep, abi.EP_RMA, abi.RMA_OPS_WRITEMSG),
            sendmsg=function(self._end.ep, abi.EP_MSG, abi.MSG_OPS_SENDMSG),
            recvmsg=function(self._end.ep, abi.EP_MSG, abi.MSG_OPS_RECVMSG),
            cq_read=function(self._end.cq, abi.CQ_OPS, abi.CQ_OPS_READ),
            cq_readerr=function(self._end.cq, abi.CQ_OPS, abi.CQ_OPS_READERR),
            ep=self._end.ep,
            cq=self._end.cq,
        )
        flags = abi.FI_COMPLETION | self._fabric.op_flags
        more = abi.FI_MORE if self._fabric.batches else 0
        self._posting = PostingState(functions, self._sizing, depth, flags, more)
        if self._posting.receives is not None:
            self._posting.set_receive_key(self.register(self._posting.receives).local_key)
