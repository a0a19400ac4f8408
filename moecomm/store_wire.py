"""What the store's client and server say to each other, and how a client finds its server."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from moecomm.errors import TransportError

MAGIC: Final = b"moecomm1"
MAX_MESSAGE: Final = 1 << 30  # bytes; a longer length prefix is a stray connection, not a value
REQUEST: Final = struct.Struct("!IBdII")  # length of the rest, op, timeout s, key, second key
REPLY: Final = struct.Struct("!IB")  # length of the value, status
GREETING: Final = struct.Struct("!I")  # length of the job's name, after MAGIC
OP_SET, OP_GET, OP_ADD, OP_DELETE, OP_EXCHANGE = range(5)
OK, ABSENT, REFUSED = range(3)

LONGEST_WAIT_S: Final = 1e6  # clocks and sockets take no infinite time-out
GREETING_TIMEOUT_S: Final = 2.0  # a listener that stays silent this long is not ours
RETRY_S: Final = 0.02


class WrongServerError(ConnectionError):
    """Something else than this job's store answered."""


def dial_any(
    addresses: Sequence[tuple[str, int]], job: str, timeout_s: float
) -> tuple[socket.socket, tuple[str, int]]:
    """Connect to the first of ``addresses`` that greets as ``job``; try until ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    reasons: dict[tuple[str, int], str] = {}
    while True:
        for address in addresses:
            left = max(0.05, deadline - time.monotonic())
            try:
                return _dial(address, job, min(left, GREETING_TIMEOUT_S)), address
            except OSError as error:
                reasons[address] = str(error) or type(error).__name__
        if time.monotonic() + RETRY_S >= deadline:
            break
        time.sleep(RETRY_S)
    tried = "; ".join(f"{host}:{port}: {why}" for (host, port), why in reasons.items())
    raise TransportError(
        f"no store answered within {timeout_s:g} s ({tried})",
        transport="store",
        operation="connect",
    )


def _dial(address: tuple[str, int], job: str, timeout_s: float) -> socket.socket:
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if receive(sock, len(MAGIC)) != MAGIC:
            raise WrongServerError("something else than a moecomm store answered")
        (length,) = GREETING.unpack(receive(sock, GREETING.size))
        name = receive(sock, min(length, 4096)).decode(errors="replace")
        if name != job:
            raise WrongServerError(f"the store there belongs to job {name!r}, not {job!r}")
    except BaseException:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes, or ``ConnectionError``."""
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        n = sock.recv_into(view[have:])
        if n == 0:
            raise ConnectionError("the other end closed the connection")
        have += n
    return bytes(data)
