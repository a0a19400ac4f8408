"""The RDMA devices of this machine, which of their ports to use, and opening one."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm import env
from moecomm.addresses import IpAddress
from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.transport.verbs import abi, gids, structures
from moecomm.transport.verbs.library import TRANSPORT, done, library, made

logger = logging.getLogger(__name__)

SYSFS: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Port:
    """Port ``number`` of ``device``: ``state`` and ``link`` as the kernel says them."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN" ...
    link: str  # "InfiniBand" or "Ethernet"
    folder: Path

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        """Whether the port speaks RDMA over Ethernet."""
        return self.link != gids.INFINIBAND

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"


def all_ports(sysfs: Path = SYSFS) -> list[Port]:
    """Every port of every device, in order of their names."""
    found = []
    for device in sorted(sysfs.glob("*")):
        for folder in sorted(device.glob("ports/*"), key=lambda f: int(f.name)):
            state = _text(folder / "state").split(":")[-1].strip()  # "4: ACTIVE"
            link = _text(folder / "link_layer")
            found.append(Port(device.name, int(folder.name), state, link, folder))
    return found


def choose_ports(names: Sequence[str] | None = None, sysfs: Path = SYSFS) -> list[Port]:
    """The ports to use: those of ``names`` ("mlx5_0", "mlx5_0:2"), in that order, else of
    ``MOECOMM_RDMA_PORTS``, else every active one of the first one's link layer.

    Raises:
        ConfigError: a name that no port has.
        TransportUnavailable: no port is active, or a named one is not.
    """
    found = all_ports(sysfs)
    listed = env.get("RDMA_PORTS")
    if names is None and listed is not None:
        names = [name.strip() for name in listed.split(",")]
    if names is not None:
        return [_named(name, found) for name in names]
    active = [port for port in found if port.active]
    if not active:
        states = ", ".join(f"{port} {port.state}" for port in found) or "no RDMA device"
        raise TransportUnavailable(f"transport={TRANSPORT!r}: no active port ({states})")
    return [port for port in active if port.link == active[0].link]


def _named(name: str, found: Sequence[Port]) -> Port:
    """The port called ``name``; without a number: the device's first active one."""
    device, _, number = name.partition(":")
    wanted = [p for p in found if p.device == device and number in ("", str(p.number))]
    if not wanted:
        known = ", ".join(f"{port.device}:{port.number}" for port in found) or "none"
        raise ConfigError(f"rdma_ports={name!r}: no such port; there are: {known}")
    for port in wanted:
        if port.active:
            return port
    raise TransportUnavailable(
        f"rdma_ports={name!r}: {wanted[0]} is {wanted[0].state}, must be ACTIVE"
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do at most; ``ibv_device_attr`` has the words."""

    max_qp: int
    max_qp_wr: int
    max_cqe: int
    max_srq_wr: int


class Device:
    """An opened device, and one port of it.

    Args:
        port: which.
        gid_index: overrides the choice of its address; ``None``: ``MOECOMM_GID_INDEX``, if set.
        near: see ``gids.choose``.

    Raises:
        TransportUnavailable: the device cannot be opened, or its port has no address.
    """

    def __init__(
        self,
        port: Port,
        *,
        gid_index: int | None = None,
        near: Sequence[IpAddress] = (),
    ) -> None:
        if gid_index is None:
            gid_index = env.integer("GID_INDEX", 0, 255)
        self.port = port
        self.gids = gids.table(port.folder)
        self.gid = gids.choose(self.gids, str(port), roce=port.roce, wanted=gid_index, near=near)
        self.context = _open(port.device)
        try:
            attributes = structures.PortAttr()
            status = library().ibv_query_port(
                self.context, port.number, ctypes.addressof(attributes)
            )
            done(status, "ibv_query_port", str(port))
            self.limits = self._query()
        except BaseException:
            self.close()
            raise
        self.lid = int(attributes.lid)
        self.mtu = int(attributes.active_mtu)  # enum ibv_mtu: 1 is 256 bytes, 5 is 4096
        self.max_message = int(attributes.max_msg_sz)
        self.poll_cq, self.post_send, self.post_recv, self.post_srq_recv = (
            structures.load(ctypes.c_uint64, self.context + offset)
            for offset in (
                abi.CONTEXT_POLL_CQ,
                abi.CONTEXT_POST_SEND,
                abi.CONTEXT_POST_RECV,
                abi.CONTEXT_POST_SRQ_RECV,
            )
        )
        logger.info("%s: %s, %s", port, port.link, self.gid)

    def close(self) -> None:
        """Idempotent; everything made of the device must be gone."""
        if self.context:
            library().ibv_close_device(self.context)
            self.context = 0

    def _query(self) -> Limits:
        attributes = structures.DeviceAttr()
        status = library().ibv_query_device(self.context, ctypes.addressof(attributes))
        done(status, "ibv_query_device", self.port.device)
        return Limits(
            max_qp=attributes.max_qp,
            max_qp_wr=attributes.max_qp_wr,
            max_cqe=attributes.max_cqe,
            max_srq_wr=attributes.max_srq_wr,
        )


def _open(name: str) -> int:
    """The ``ibv_context`` of the device ``name``."""
    lib, count = library(), ctypes.c_int()
    devices = lib.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        made(None, "ibv_get_device_list", name)
    try:
        for device in devices[: count.value]:
            if lib.ibv_get_device_name(device).decode() == name:
                return made(lib.ibv_open_device(device), "ibv_open_device", name, _ACCESS)
    finally:
        lib.ibv_free_device_list(devices)
    raise TransportUnavailable(
        f"transport={TRANSPORT!r}: the kernel has {name}, libibverbs does not know it: "
        "install its provider (ibverbs-providers), and see that /dev/infiniband is there"
    )


_ACCESS: Final = "; does this user have read and write access to /dev/infiniband/uverbs*?"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
