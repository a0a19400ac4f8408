"""Names and addresses of this machine, as other ranks may need them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_TOKEN: Final = secrets.token_hex(8)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine() -> str:
    """Equal for processes that reach each other over loopback: same kernel, same network."""
    boot, network = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").stat().st_ino)
    return f"{socket.gethostname()} {boot} {network}"


def process() -> str:
    """Equal for threads of one process only: numbers of processes repeat between containers."""
    return f"{_TOKEN} {os.getpid()}"


def own_addresses() -> list[str]:
    """Where other machines may reach this one, most likely first. A wrong one does no harm:
    whoever answers there does not know the job."""
    found: dict[str, None] = {}
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, "192.0.2.1", "2001:db8::1"):  # the last two are never sent anything
        with contextlib.suppress(OSError):
            found[_address_towards(target)] = None
    with contextlib.suppress(OSError):
        found.update(dict.fromkeys(_addresses_of(socket.gethostname())))
    found[socket.gethostname()] = None
    return [a for a in found if not is_loopback(a)] or ["127.0.0.1", "::1"]


def meeting_addresses(host: str) -> tuple[IpAddress, ...]:
    """``host``, where the ranks have met, as addresses; where that is this machine itself, or ""
    (nowhere), what others may know it by. Ranks on all machines so come to addresses of one."""
    names: Iterable[str] = ()
    with contextlib.suppress(OSError):
        names = dict.fromkeys(_addresses_of(host)) if host else ()
    names = [name for name in names if not is_loopback(name)] or own_addresses()[:1]
    found = []
    for name in names:
        with contextlib.suppress(ValueError):  # a name that nobody resolves
            found.append(ipaddress.ip_address(name))
    return tuple(found)


def _address_towards(target: str) -> str:
    """This machine's address on the route to ``target`` (a UDP connect sends no packet)."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        target or None, 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def _addresses_of(host: str) -> Iterator[str]:
    for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        yield str(address[0])
