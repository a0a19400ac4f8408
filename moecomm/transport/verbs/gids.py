"""Which of a port's addresses (GIDs) to use, read from sysfs.

A RoCE port has several: one per IP address of its network device and per RoCE version. Version 1
does not cross routers and many switches drop it, link-local ones do not cross routers either, and
both ends of a connection must use the same kind. The wrong one usually connects, and the first
write then times out. Among equals the choice falls on the address most like that of the ranks'
meeting point: the same for all of them, so they come to one subnet in whatever order their tables
are.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm.addresses import IpAddress
from moecomm.errors import ConfigError, TransportUnavailable

INFINIBAND: Final = "InfiniBand"
ROCE_V2: Final = "RoCE v2"
_V1: Final = ("IB/RoCE v1", "RoCE v1")
_LONGEST_HOLE: Final = 64  # the kernel takes the lowest free entry, so holes are small
_MAPPED: Final = b"\0" * 10 + b"\xff\xff"


@dataclass(frozen=True, slots=True)
class Gid:
    """Entry ``index`` of a port's table: 16 bytes, of ``kind`` "RoCE v2", "IB/RoCE v1" ..."""

    index: int
    raw: bytes
    kind: str

    @property
    def is_ipv4(self) -> bool:
        """Whether the address is an IPv4 one, mapped into IPv6."""
        return self.raw.startswith(_MAPPED)

    @property
    def version(self) -> int:
        """Of RoCE; without a meaning on InfiniBand."""
        return 1 if self.kind in _V1 else 2

    @property
    def address(self) -> IpAddress:
        """The IP address that the entry stands for (on InfiniBand it only looks like one)."""
        if self.is_ipv4:
            return ipaddress.IPv4Address(self.raw[12:])
        return ipaddress.IPv6Address(self.raw)

    def __str__(self) -> str:
        return f"GID {self.index} ({self.kind}, {self.address})"


def table(port: Path) -> list[Gid]:
    """The entries in use below a port's sysfs folder (``.../DEVICE/ports/1``)."""
    found: list[Gid] = []
    index = 0
    while index - (found[-1].index if found else 0) < _LONGEST_HOLE:
        raw = bytes.fromhex(_text(f"{port}/gids/{index}").replace(":", ""))
        if any(raw):  # an empty entry has no type: reading that is an error
            found.append(Gid(index, raw, _text(f"{port}/gid_attrs/types/{index}")))
        index += 1
    return found


def choose(
    gids: Sequence[Gid],
    where: str,
    *,
    roce: bool,
    wanted: int | None = None,
    near: Sequence[IpAddress] = (),
) -> Gid:
    """The entry to use of a port that errors call ``where``.

    RoCE: version 2 before version 1, an IPv4 address before IPv6, one that others can reach before
    loopback and link-local ones; then the one with most leading bits of one of ``near``; then the
    lowest. InfiniBand: entry 0, the port's own. ``wanted`` overrides all that.

    Raises:
        ConfigError: there is no entry ``wanted``.
        TransportUnavailable: there is none at all.
    """
    shown = ", ".join(map(str, gids)) or "none"
    if wanted is not None:
        for gid in gids:
            if gid.index == wanted:
                return gid
        raise ConfigError(f"gid_index={wanted}: {where} has no such GID; it has: {shown}")
    if not gids:
        raise TransportUnavailable(
            f"{where} has no GID: its network device needs an IP address, and to be up"
        )
    return min(gids, key=lambda gid: _badness(gid, near) if roce else gid.index)


def _badness(gid: Gid, near: Sequence[IpAddress]) -> tuple[int, ...]:
    address = gid.address
    # Every port has a link-local entry made from its MAC address, whether or not the network
    # device has that address.
    reach = 2 if address.is_link_local else int(address.is_loopback)
    shared = max((_shared_bits(address, other) for other in near), default=0)
    return -gid.version, reach, not gid.is_ipv4, -shared, gid.index


def _shared_bits(a: IpAddress, b: IpAddress) -> int:
    """How many leading bits are the same: subnets' masks are not known here."""
    if a.version != b.version:
        return 0
    return a.max_prefixlen - (int(a) ^ int(b)).bit_length()


def _text(file: str) -> str:
    """The text of a small file; empty where it cannot be read. Without ``pathlib``, which takes
    longer than the kernel: tables have up to 1024 entries."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)
