"""One libfabric endpoint as a ``Nic``: everything outside the hot path."""

from __future__ import annotations

import ctypes as C
import itertools
import logging
from collections.abc import Sequence
from typing import Final

from moecomm.errors import TransportError, TransportUnavailable
from moecomm.transport.base import Region
from moecomm.transport.efa import abi, hot
from moecomm.transport.efa.fabrics import Fabric, Option
from moecomm.transport.efa.library import (
    Library,
    call,
    function,
    half,
    set_half,
    set_word,
    text,
    word,
)
from moecomm.transport.efa.posting_state import Functions, PostingState
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.provider import Hooks, Limits, Registration, Sizing

logger = logging.getLogger(__name__)

_ACCESS: Final = (
    abi.FI_SEND | abi.FI_RECV | abi.FI_READ | abi.FI_WRITE
    | abi.FI_REMOTE_READ | abi.FI_REMOTE_WRITE
)  # fmt: skip
_NAME_BYTES: Final = 256


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
        self._info = info
        self._sizing = sizing
        self._fids: list[int] = []  # in the order of opening
        self._mrs: dict[int, int] = {}  # by local key and remote key
        self._keys = itertools.count(1)
        self._num_peers = 0
        self.device = device_of(info)
        self.transport = fabric.name
        try:
            self._check_info()
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def limits(self) -> Limits:
        """See ``Nic.limits``."""
        return self._limits

    @property
    def hooks(self) -> Hooks:
        """See ``Nic.hooks``."""
        return Hooks(hot.POST, hot.POLL, self._posting.address)

    def address(self) -> bytes:
        """See ``Nic.address``."""
        return self._address

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
                self._av, abi.AV_OPS, abi.AV_OPS_INSERT,
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
        by_address = self._mr_mode & abi.FI_MR_VIRT_ADDR
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
            function(self._cq, abi.CQ_OPS, abi.CQ_OPS_STRERROR)
        )
        more = kind(self._cq, C.c_int(detail).value, None, C.addressof(said), len(said))
        return f"{meaning}; provider's {detail}: {(more or b'').decode(errors='replace')}"

    def close(self) -> None:
        """See ``Nic.close``."""
        for mr in self._mrs.values():
            call(mr, abi.FID_OPS, abi.OPS_CLOSE)
        self._mrs.clear()
        while self._fids:
            fid = self._fids.pop()
            code = call(fid, abi.FID_OPS, abi.OPS_CLOSE)
            if code != 0:
                logger.debug("%s: closing %#x gives %d", self.device, fid, code)
        if self._info:
            self._library.free(self._info)
            self._info = 0

    # ---- Opening --------------------------------------------------------------------------------

    def _check_info(self) -> None:
        domain = word(self._info, abi.INFO_DOMAIN_ATTR)
        self._mr_mode = half(domain, abi.DOMAIN_MR_MODE)
        known = self._fabric.mr_mode | abi.FI_MR_HMEM | 3  # 1 and 2: basic and scalable, of old
        if self._mr_mode & ~known:
            self._refuse(f"wants registration modes {self._mr_mode & ~known:#x}")
        mode = word(self._info, abi.INFO_MODE)
        if mode & ~self._fabric.modes:
            self._refuse(f"wants modes {mode & ~self._fabric.modes:#x}")
        imm_bytes = word(domain, abi.DOMAIN_CQ_DATA_SIZE)
        if imm_bytes < 4:
            self._refuse(f"carries immediates of {imm_bytes} bytes, 4 are needed")

    def _open(self) -> None:
        code, fabric = self._library.open_fabric(self._info)
        self._keep(code, fabric, "fi_fabric")
        self._domain = self._make(
            "fi_domain", fabric, abi.FABRIC_OPS, abi.FABRIC_OPS_DOMAIN, self._info
        )
        transmit = word(self._info, abi.INFO_TX_ATTR)
        depth = min(self._sizing.tx_depth, word(transmit, abi.TX_SIZE) or self._sizing.tx_depth)
        self._cq = self._open_cq(depth + self._sizing.rx_depth)
        self._av = self._open_av()
        self._ep = self._make(
            "fi_endpoint", self._domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_ENDPOINT, self._info
        )
        self._do("fi_ep_bind", abi.FID_OPS, abi.OPS_BIND, self._cq, abi.FI_SEND | abi.FI_RECV)
        self._do("fi_ep_bind", abi.FID_OPS, abi.OPS_BIND, self._av, 0)
        for option in self._fabric.options:
            self._set(option)
        self._do("fi_enable", abi.FID_OPS, abi.OPS_CONTROL, abi.FI_ENABLE, 0)
        for option in self._fabric.must_be_off:
            self._check_off(option)
        self._address = self._name()
        longest = self._get_size(abi.FI_OPT_MAX_RMA_SIZE)
        if longest is None:
            longest = word(word(self._info, abi.INFO_EP_ATTR), abi.EP_MAX_MSG_SIZE)
        self._limits = Limits(tx_depth=depth, peer_depth=depth, max_bytes=min(longest, 1 << 62))
        self._lay_out(depth)

    def _open_cq(self, size: int) -> int:
        attr = Block(abi.CQ_ATTR_BYTES)
        set_word(attr.address, abi.CQ_ATTR_SIZE, size)
        set_half(attr.address, abi.CQ_ATTR_FORMAT, abi.FI_CQ_FORMAT_DATA)
        return self._make(
            "fi_cq_open", self._domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_CQ_OPEN, attr.address
        )

    def _open_av(self) -> int:
        attr = Block(abi.AV_ATTR_BYTES)
        set_half(attr.address, abi.AV_ATTR_TYPE, abi.FI_AV_TABLE)
        set_word(attr.address, abi.AV_ATTR_COUNT, self._sizing.num_peers)
        return self._make(
            "fi_av_open", self._domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_AV_OPEN, attr.address
        )

    def _make(self, what: str, parent: int, ops: int, place: int, argument: int) -> int:
        out = C.c_void_p()
        code = call(parent, ops, place, argument, C.addressof(out), 0)
        return self._keep(code, out.value or 0, what)

    def _keep(self, code: int, fid: int, what: str) -> int:
        if code != 0:
            self._refuse(f"{what} failed: {self._library.strerror(code)} ({code})")
        self._fids.append(fid)
        return fid

    def _do(self, what: str, ops: int, place: int, *arguments: int) -> None:
        code = call(self._ep, ops, place, *arguments)
        if code != 0:
            self._refuse(f"{what} failed: {self._library.strerror(code)} ({code})")

    def _refuse(self, why: str) -> None:
        version = ".".join(map(str, self._library.version))
        raise TransportUnavailable(
            f"{self.device} ({self.transport}, libfabric {version} at {self._library.path}): {why}"
        )

    # ---- Options --------------------------------------------------------------------------------

    def _set(self, option: Option) -> None:
        value = C.c_bool(option.value)
        code = call(
            self._ep, abi.EP_OPS, abi.EP_OPS_SETOPT,
            abi.FI_OPT_ENDPOINT, option.number, C.addressof(value), 1,
        )  # fmt: skip
        if code == 0:
            return
        said = f"{option.name}={option.value}: {self._library.strerror(code)} ({code})"
        if option.required:
            self._refuse(f"cannot set {said}")
        logger.debug("%s: %s", self.device, said)  # nothing to turn off here

    def _check_off(self, option: Option) -> None:
        """The provider must not do by messages what the network interface cannot."""
        value, nbytes = C.c_bool(False), C.c_size_t(1)
        code = call(
            self._ep, abi.EP_OPS, abi.EP_OPS_GETOPT,
            abi.FI_OPT_ENDPOINT, option.number, C.addressof(value), C.addressof(nbytes),
        )  # fmt: skip
        if code != 0:
            self._refuse(f"does not tell {option.name}: {self._library.strerror(code)} ({code})")
        if value.value:
            self._refuse(
                f"would emulate RDMA writes by messages ({option.name} is true): the instance type "
                "or the driver has no RDMA write, or FI_EFA_USE_DEVICE_RDMA=0 is set"
            )

    def _get_size(self, number: int) -> int | None:
        value, nbytes = C.c_size_t(0), C.c_size_t(8)
        code = call(
            self._ep, abi.EP_OPS, abi.EP_OPS_GETOPT,
            abi.FI_OPT_ENDPOINT, number, C.addressof(value), C.addressof(nbytes),
        )  # fmt: skip
        return int(value.value) if code == 0 and value.value else None

    def _name(self) -> bytes:
        buffer, nbytes = C.create_string_buffer(_NAME_BYTES), C.c_size_t(_NAME_BYTES)
        self._do(
            "fi_getname", abi.EP_CM, abi.CM_OPS_GETNAME,
            C.addressof(buffer), C.addressof(nbytes),
        )  # fmt: skip
        return buffer.raw[: nbytes.value]

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
            self._domain, abi.DOMAIN_MR, abi.MR_OPS_REGATTR,
            attr.address, flags, C.addressof(out),
        )  # fmt: skip
        if code != 0 or not out.value:
            where = f"GPU {self._sizing.cuda_device}" if on_gpu else "host memory"
            raise TransportError(
                f"{self.device} ({self.transport}): cannot register {region.nbytes} bytes of "
                f"{where} at {region.address:#x}: {self._library.strerror(code)} ({code}). "
                + (
                    "GPU memory needs a DMA-BUF or nvidia-peermem"
                    if on_gpu
                    else "ulimit -l must allow it"
                ),
                transport=self.transport,
                operation="register",
                code=-code,
            )
        return int(out.value)

    def _lay_out(self, depth: int) -> None:
        functions = Functions(
            writemsg=function(self._ep, abi.EP_RMA, abi.RMA_OPS_WRITEMSG),
            sendmsg=function(self._ep, abi.EP_MSG, abi.MSG_OPS_SENDMSG),
            recvmsg=function(self._ep, abi.EP_MSG, abi.MSG_OPS_RECVMSG),
            cq_read=function(self._cq, abi.CQ_OPS, abi.CQ_OPS_READ),
            cq_readerr=function(self._cq, abi.CQ_OPS, abi.CQ_OPS_READERR),
            ep=self._ep,
            cq=self._cq,
        )
        flags = abi.FI_COMPLETION | self._fabric.op_flags
        more = abi.FI_MORE if self._fabric.batches else 0
        self._posting = PostingState(functions, self._sizing, depth, flags, more)
        if self._posting.receives is not None:
            self._posting.set_receive_key(self.register(self._posting.receives).local_key)


def device_of(info: int) -> str:
    """The name of an interface: its domain's."""
    return text(word(word(info, abi.INFO_DOMAIN_ATTR), abi.DOMAIN_NAME))
