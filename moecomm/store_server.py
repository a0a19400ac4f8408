"""The server half of ``moecomm.store``: one thread, one selector, no locks.

A single thread owns all state, so a client that dies, stalls or sends garbage costs only its own
connection, and a set is answered to everyone who waits before its sender hears that it is done.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import defaultdict
from typing import Final

from moecomm import forks
from moecomm.errors import ConfigError
from moecomm.store_wire import (
    ABSENT,
    GREETING,
    LONGEST_WAIT_S,
    MAGIC,
    MAX_MESSAGE,
    OK,
    OP_ADD,
    OP_DELETE,
    OP_EXCHANGE,
    OP_GET,
    OP_SET,
    REFUSED,
    REPLY,
    REQUEST,
)

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
CHUNK: Final = 1 << 18
FLUSH_S: Final = 1.0  # at the end, how long answers may take to leave


class _Client:
    """One connection: what came in and is not a whole request yet, what still has to go out."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.waits_for: str | None = None
        self.ticket = 0  # of the wait under way; an older deadline means nothing


class StoreServer:
    """Serve a store from a daemon thread of this process.

    Args:
        host: address or name to listen on; ``None``: every interface, IPv6 and IPv4 where the
            machine has both.
        port: 0: any free one; see the attribute ``port``.
        job: name that clients must know. Other clients leave without having sent anything.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str | None = None, port: int = 0, *, job: str = "") -> None:
        if not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"port={port!r}: must be an integer from 0 to 65535")
        self._pid = os.getpid()
        self._greeting = MAGIC + GREETING.pack(len(job.encode())) + job.encode()
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[_Client]] = defaultdict(list)
        self._deadlines: list[tuple[float, int, _Client]] = []
        self._tickets = itertools.count(1)
        self._clients: set[_Client] = set()
        self._stopping = False
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="moecomm-store", daemon=True)
        self._thread.start()
        forks.tell(self)
        atexit.register(self.close)  # a daemon thread dies at exit with answers in its hands

    def close(self) -> None:
        """Send the answers that are due, close every connection, end the thread. Idempotent."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()
        atexit.unregister(self.close)
        self._waker.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def after_fork_in_child(self) -> None:
        """In a forked child, which has the sockets but not the thread."""
        for sock in (self._listener, self._waker, self._woken, *(c.sock for c in self._clients)):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._next_wait()):
                    self._handle(key.fileobj, key.data, events)
                self._expire()
            self._flush()
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._listener.close()
            self._woken.close()
            self._selector.close()

    def _handle(self, source: object, client: _Client | None, events: int) -> None:
        if client is None:
            if source is self._listener:
                self._accept()
            return
        if events & selectors.EVENT_WRITE:
            self._send(client)
        if events & selectors.EVENT_READ and client in self._clients:
            self._read(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the client left already, or this process has no descriptors
            logger.debug("store: accept failed: %s", error)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        client.outbox += self._greeting
        self._send(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            logger.debug("store: lost a client: %s", error)
            data = b""
        if not data:
            self._drop(client)
            return
        client.inbox += data
        while client in self._clients and len(client.inbox) >= REQUEST.size:
            length, op, wait_s, first, second = REQUEST.unpack_from(client.inbox)
            if length > MAX_MESSAGE or op > OP_EXCHANGE or first + second > length:
                logger.warning("store: dropped a client that does not speak the protocol")
                self._drop(client)
                return
            end = REQUEST.size + length
            if len(client.inbox) < end:
                return
            body = bytes(memoryview(client.inbox)[REQUEST.size : end])
            del client.inbox[:end]
            key = body[:first].decode(errors="replace")
            wait_key = body[first : first + second].decode(errors="replace")
            self._execute(client, op, key, wait_key, body[first + second :], wait_s)

    def _execute(
        self, client: _Client, op: int, key: str, wait_key: str, value: bytes, wait_s: float
    ) -> None:
        if op in (OP_SET, OP_EXCHANGE):
            self._store(key, value)
            if op == OP_SET:
                self._answer(client, OK)
        elif op == OP_ADD:
            self._add(client, key, value)
        elif op == OP_DELETE:
            self._values.pop(key, None)
            self._answer(client, OK)
        if op in (OP_GET, OP_EXCHANGE):
            self._get(client, wait_key, wait_s)

    def _add(self, client: _Client, key: str, value: bytes) -> None:
        try:
            total = b"%d" % (int(self._values.get(key, b"0")) + int(value))
        except ValueError:
            self._answer(client, REFUSED, b"holds a value that is not a counter")
            return
        self._store(key, total)
        self._answer(client, OK, total)

    def _store(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            self._answer(waiting, OK, value)

    def _get(self, client: _Client, key: str, wait_s: float) -> None:
        if key in self._values:
            self._answer(client, OK, self._values[key])
        elif not wait_s > 0:
            self._answer(client, ABSENT)
        else:
            client.waits_for, client.ticket = key, next(self._tickets)
            self._waiting[key].append(client)
            deadline = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
            heapq.heappush(self._deadlines, (deadline, client.ticket, client))

    def _next_wait(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] != self._deadlines[0][2].ticket:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - time.monotonic())

    def _expire(self) -> None:
        while self._next_wait() == 0.0:
            client = heapq.heappop(self._deadlines)[2]
            self._stop_waiting(client)
            self._answer(client, ABSENT)

    def _stop_waiting(self, client: _Client) -> None:
        key, client.waits_for, client.ticket = client.waits_for, None, 0
        if key is not None and key in self._waiting:
            self._waiting[key] = [c for c in self._waiting[key] if c is not client]
            if not self._waiting[key]:
                del self._waiting[key]

    def _answer(self, client: _Client, status: int, value: bytes = b"") -> None:
        client.waits_for, client.ticket = None, 0
        client.outbox += REPLY.pack(len(value), status) + value
        self._send(client)

    def _send(self, client: _Client) -> None:
        try:
            while client.outbox:
                del client.outbox[: client.sock.send(client.outbox)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            logger.debug("store: lost a client: %s", error)
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        self._selector.modify(client.sock, events, client)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._stop_waiting(client)
        self._selector.unregister(client.sock)
        client.sock.close()

    def _flush(self) -> None:
        deadline = time.monotonic() + FLUSH_S
        while time.monotonic() < deadline and any(c.outbox for c in self._clients):
            for key, events in self._selector.select(0.05):
                if key.data is not None and events & selectors.EVENT_WRITE:
                    self._send(key.data)


def loopback_host() -> str:
    """The loopback address of this machine: IPv4's unless there is only IPv6."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return "127.0.0.1"
    except OSError:
        return "::1"


def _listen(host: str | None, port: int) -> socket.socket:
    if host is not None:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be compiled in and switched off
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=BACKLOG)
