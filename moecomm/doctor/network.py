"""The local network stack: ranks meet over TCP, in IPv4 or IPv6."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moecomm.doctor.finding import Finding, absent, bad, ok

TOPIC: Final = "Network"
_LOOPBACK: Final = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}


@dataclass(frozen=True, slots=True)
class Network:
    """Per protocol: ``None`` when a connection over loopback works, else why not."""

    ipv4: str | None = None
    ipv6: str | None = None


def probe(connect: Callable[[socket.AddressFamily, str], None] | None = None) -> Network:
    attempt = _connect if connect is None else connect
    return Network(*(_refusal(attempt, name) for name in ("IPv4", "IPv6")))


def _refusal(attempt: Callable[[socket.AddressFamily, str], None], name: str) -> str | None:
    try:
        attempt(*_LOOPBACK[name])
    except OSError as error:
        return error.strerror or str(error)
    return None


def _connect(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind((address, 0))
        server.listen(1)
        client.settimeout(5.0)
        client.connect(server.getsockname())


def findings(network: Network) -> list[Finding]:
    found = []
    neither = network.ipv4 is not None and network.ipv6 is not None
    for name, refusal in (("IPv4", network.ipv4), ("IPv6", network.ipv6)):
        if refusal is None:
            found.append(ok(TOPIC, name, "works on loopback", required=neither))
        elif neither:
            fix = "bring up the loopback interface: ip link set lo up (as root)"
            found.append(bad(TOPIC, name, refusal, fix, required=True))
        else:
            found.append(absent(TOPIC, name, f"{refusal}; the other protocol is enough"))
    return found
