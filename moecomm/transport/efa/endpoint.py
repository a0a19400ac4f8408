"""One libfabric endpoint, with what it needs: checked, opened, its options set."""

from __future__ import annotations

import ctypes as C
import logging
from typing import Final, NoReturn

from moecomm.errors import TransportUnavailable
from moecomm.transport.efa import abi
from moecomm.transport.efa.fabrics import Fabric, Option
from moecomm.transport.efa.library import Library, call, half, set_half, set_word, text, word
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.provider import Limits, Sizing

logger = logging.getLogger(__name__)

_NAME_BYTES: Final = 256


class Endpoint:
    """An enabled endpoint.

    Args:
        library: the copy of libfabric that ``info`` is from.
        fabric: what was asked for.
        info: an ``fi_info``; this object's from now on.
        sizing: see ``Sizing``.

    Attributes:
        device: name of the interface.
        transport: name of what was asked for.
        mr_mode: how memory must be registered.
        domain, cq, av, ep: addresses of libfabric's objects.
        name: what peers put into their address vectors.
        limits: see ``Limits``.

    Raises:
        TransportUnavailable: it is not what was asked for, or a call fails.
    """

    def __init__(self, library: Library, fabric: Fabric, info: int, sizing: Sizing) -> None:
        self._library = library
        self._fabric = fabric
        self._info = info
        self._sizing = sizing
        self._fids: list[int] = []  # in the order of opening
        self.device = device_of(info)
        self.transport = fabric.name
        try:
            self._check_info()
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close everything, the last opened first. Idempotent."""
        while self._fids:
            fid = self._fids.pop()
            code = call(fid, abi.FID_OPS, abi.OPS_CLOSE)
            if code != 0:
                logger.debug("%s: closing %#x gives %d", self.device, fid, code)
        if self._info:
            self._library.free(self._info)
            self._info = 0

    def _check_info(self) -> None:
        domain = word(self._info, abi.INFO_DOMAIN_ATTR)
        self.mr_mode = half(domain, abi.DOMAIN_MR_MODE)
        known = self._fabric.mr_mode | abi.FI_MR_HMEM | 3  # 1 and 2: basic and scalable, of old
        if self.mr_mode & ~known:
            self._refuse(f"wants registration modes {self.mr_mode & ~known:#x}")
        wanted = word(self._info, abi.INFO_MODE) & ~self._fabric.modes
        if wanted & abi.FI_RX_CQ_DATA:
            self._refuse(
                "wants a receive for every write with an immediate (FI_RX_CQ_DATA): the device or "
                "its firmware cannot do without, or FI_EFA_USE_UNSOLICITED_WRITE_RECV=0 is set"
            )
        if wanted:
            self._refuse(f"wants modes {wanted:#x}")
        imm_bytes = word(domain, abi.DOMAIN_CQ_DATA_SIZE)
        if imm_bytes < 4:
            self._refuse(f"carries immediates of {imm_bytes} bytes, 4 are needed")

    def _open(self) -> None:
        code, fabric = self._library.open_fabric(self._info)
        self._keep(code, fabric, "fi_fabric")
        self.domain = self._make(
            "fi_domain", fabric, abi.FABRIC_OPS, abi.FABRIC_OPS_DOMAIN, self._info
        )
        transmit = word(self._info, abi.INFO_TX_ATTR)
        depth = min(self._sizing.tx_depth, word(transmit, abi.TX_SIZE) or self._sizing.tx_depth)
        self.cq = self._open_cq(depth + self._sizing.rx_depth)
        self.av = self._open_av()
        self.ep = self._make(
            "fi_endpoint", self.domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_ENDPOINT, self._info
        )
        self._do("fi_ep_bind", abi.FID_OPS, abi.OPS_BIND, self.cq, abi.FI_SEND | abi.FI_RECV)
        self._do("fi_ep_bind", abi.FID_OPS, abi.OPS_BIND, self.av, 0)
        for option in self._fabric.options:
            self._set(option)
        self._do("fi_enable", abi.FID_OPS, abi.OPS_CONTROL, abi.FI_ENABLE, 0)
        for option in self._fabric.must_be_off:
            self._check_off(option)
        self.name = self._get_name()
        longest = self._get_size(abi.FI_OPT_MAX_RMA_SIZE)
        if longest is None:
            longest = word(word(self._info, abi.INFO_EP_ATTR), abi.EP_MAX_MSG_SIZE)
        self.limits = Limits(tx_depth=depth, peer_depth=depth, max_bytes=min(longest, 1 << 62))

    def _open_cq(self, size: int) -> int:
        attr = Block(abi.CQ_ATTR_BYTES)
        set_word(attr.address, abi.CQ_ATTR_SIZE, size)
        set_half(attr.address, abi.CQ_ATTR_FORMAT, abi.FI_CQ_FORMAT_DATA)
        return self._make(
            "fi_cq_open", self.domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_CQ_OPEN, attr.address
        )

    def _open_av(self) -> int:
        attr = Block(abi.AV_ATTR_BYTES)
        set_half(attr.address, abi.AV_ATTR_TYPE, abi.FI_AV_TABLE)
        set_word(attr.address, abi.AV_ATTR_COUNT, self._sizing.num_peers)
        return self._make(
            "fi_av_open", self.domain, abi.DOMAIN_OPS, abi.DOMAIN_OPS_AV_OPEN, attr.address
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
        code = call(self.ep, ops, place, *arguments)
        if code != 0:
            self._refuse(f"{what} failed: {self._library.strerror(code)} ({code})")

    def _refuse(self, why: str) -> NoReturn:
        version = ".".join(map(str, self._library.version))
        raise TransportUnavailable(
            f"{self.device} ({self.transport}, libfabric {version} at {self._library.path}): {why}"
        )

    # ---- Options --------------------------------------------------------------------------------

    def _set(self, option: Option) -> None:
        value = C.c_bool(option.value)
        code = call(
            self.ep, abi.EP_OPS, abi.EP_OPS_SETOPT,
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
            self.ep, abi.EP_OPS, abi.EP_OPS_GETOPT,
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
            self.ep, abi.EP_OPS, abi.EP_OPS_GETOPT,
            abi.FI_OPT_ENDPOINT, number, C.addressof(value), C.addressof(nbytes),
        )  # fmt: skip
        return int(value.value) if code == 0 and value.value else None

    def _get_name(self) -> bytes:
        buffer, nbytes = C.create_string_buffer(_NAME_BYTES), C.c_size_t(_NAME_BYTES)
        self._do(
            "fi_getname", abi.EP_CM, abi.CM_OPS_GETNAME,
            C.addressof(buffer), C.addressof(nbytes),
        )  # fmt: skip
        return buffer.raw[: nbytes.value]


def device_of(info: int) -> str:
    """The name of an interface: its domain's."""
    return text(word(word(info, abi.INFO_DOMAIN_ATTR), abi.DOMAIN_NAME))
