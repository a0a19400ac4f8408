"""A key-value store over TCP: how ranks find each other before they can communicate.

One process (rank 0, or whoever calls ``moecomm.run``) serves; every rank, also the serving one,
is a client. Nothing but length-prefixed bytes travels, so that a stranger who connects can at
worst confuse a start-up, never run code. There is no authentication beyond the ``job`` name in
the greeting: serve on an interface that you trust.

The server speaks first, ``moecomm1`` and the job's name. A client therefore recognises a port
that something else listens on without sending it a byte, and a server that belongs to another job
(a neighbour, or the same job before its restart).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from moecomm import forks
from moecomm.errors import ConfigError, StateError, TransportError
from moecomm.store_wire import (
    ABSENT,
    LONGEST_WAIT_S,
    MAX_MESSAGE,
    OP_ADD,
    OP_DELETE,
    OP_EXCHANGE,
    OP_GET,
    OP_SET,
    REFUSED,
    REPLY,
    REQUEST,
    dial_any,
    receive,
)

if TYPE_CHECKING:
    from moecomm.store_server import StoreServer

REPLY_GRACE_S: Final = 5.0  # the server ends waits itself; this much later it counts as lost


class Store(Protocol):
    """What a ``Group`` needs. ``get`` blocks until the key is set, or raises ``TimeoutError``."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...
    def add(self, key: str, n: int) -> int: ...
    def delete(self, key: str) -> None: ...


class TcpStore:
    """Client of a store. Safe to use from several threads: waits do not hold each other up.

    Args:
        host: name or address (IPv4 or IPv6, without brackets) of the server.
        port: its port.
        job: name that the server must have been started with.
        serve: also start the server in this process, on every interface; ``close`` ends it.
        timeout_s: how long to try to connect, and how long a call that does not wait may take.

    Raises:
        TransportError: no such store answered in time, or it went away later.
        StateError: used after ``close``, or in a process forked from the one that made it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        serve: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        self._server: StoreServer | None = None
        if serve:
            from moecomm.store_server import StoreServer

            self._server = StoreServer(None, port, job=job)
            port = self._server.port
        self._setup([(host, port)], job, timeout_s)

    @classmethod
    def connect(
        cls,
        addresses: Sequence[tuple[str, int]],
        *,
        job: str = "",
        server: StoreServer | None = None,
        timeout_s: float = 30.0,
    ) -> TcpStore:
        """A client of whichever address first answers as ``job``.

        ``server``: one in this process that the client owns from now on: ``close`` ends it.
        """
        store = cls.__new__(cls)
        store._server = server
        store._setup(addresses, job, timeout_s)
        return store

    def _setup(self, addresses: Sequence[tuple[str, int]], job: str, timeout_s: float) -> None:
        self._pid = os.getpid()
        self._job = job
        self._timeout_s = timeout_s
        self._closed = False
        self._loss: str | None = None  # why the server counts as gone
        self._lock = threading.Lock()
        # One connection per call under way: a second thread must be able to set the key that the
        # first one's peer waits for.
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        try:
            first, self.address = dial_any(addresses, job, timeout_s)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self._idle.append(first)
        forks.tell(self)

    def set(self, key: str, value: bytes) -> None:
        """Set ``key``; whoever waits for it goes on."""
        self._call(OP_SET, key, value=value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``; waits up to ``timeout_s`` for it, 0: not at all.

        Raises:
            TimeoutError: the key was not set in time.
        """
        return self._wait(OP_GET, key, key, b"", timeout_s)

    def add(self, key: str, n: int) -> int:
        """Add ``n`` to the counter ``key`` (absent: 0) and return the sum, atomically."""
        return int(self._call(OP_ADD, key, value=b"%d" % n))

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens when it is absent."""
        self._call(OP_DELETE, key)

    def exchange(self, key: str, value: bytes, wait_key: str, timeout_s: float) -> bytes:
        """``set(key, value)``, then ``get(wait_key)``, as one message.

        The server has this client's wait before anyone can see ``key``. Whoever sets ``wait_key``
        after reading ``key`` may therefore close the server at once: the answer is already out.
        """
        return self._wait(OP_EXCHANGE, key, wait_key, value, timeout_s)

    def close(self) -> None:
        """Disconnect, and end the server when it is owned. Idempotent."""
        if os.getpid() != self._pid:
            return  # the parent's connections; fork already closed this process's copies
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._busy]
            self._idle.clear()
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
            sock.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> TcpStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, op: int, key: str, wait_key: str, value: bytes, timeout_s: float) -> bytes:
        try:
            return self._call(op, key, wait_key, value, min(max(0.0, timeout_s), LONGEST_WAIT_S))
        except KeyError:
            raise TimeoutError(f"store key {wait_key!r} was not set in {timeout_s:g} s") from None

    def _call(
        self, op: int, key: str, wait_key: str = "", value: bytes = b"", wait_s: float = 0.0
    ) -> bytes:
        self._check_usable()
        first, second = key.encode(), wait_key.encode()
        length = len(first) + len(second) + len(value)
        if length > MAX_MESSAGE:
            raise ConfigError(f"value of {len(value)} bytes for {key!r}: at most {MAX_MESSAGE}")
        head = REQUEST.pack(length, op, wait_s, len(first), len(second))
        sock = self._take()
        try:
            sock.settimeout(wait_s + max(REPLY_GRACE_S, self._timeout_s))
            sock.sendall(b"".join((head, first, second, value)))
            size, status = REPLY.unpack(receive(sock, REPLY.size))
            answer = receive(sock, size)
        except BaseException as error:
            self._drop(sock)
            if not isinstance(error, OSError):
                raise
            self._loss = f"key {key!r}: {error}"
            raise self._lost() from error
        self._give_back(sock)
        if status == ABSENT:
            raise KeyError(key)
        if status == REFUSED:
            raise ConfigError(f"store key {key!r}: {answer.decode()}")
        return answer

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this store was opened by process {self._pid}; process {os.getpid()} was forked "
                "from it and must open its own"
            )
        if self._closed:
            raise StateError("the store is closed")
        if self._loss is not None:
            raise self._lost()

    def _lost(self) -> Exception:
        if self._closed:
            return StateError("the store was closed during a call")
        host, port = self.address
        return TransportError(
            f"lost the store at {host}:{port} ({self._loss}); the process that serves it, "
            "rank 0 unless you started it elsewhere, must outlive every group that uses it",
            transport="store",
            operation="store",
        )

    def _take(self) -> socket.socket:
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        if sock is None:
            sock, _ = dial_any([self.address], self._job, self._timeout_s)
        with self._lock:
            if not self._closed:
                self._busy.add(sock)
                return sock
        sock.close()
        raise StateError("the store is closed")

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
            if not self._closed:
                self._idle.append(sock)

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
        sock.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: close its copies, so that the parent's end is seen by the server."""
        for sock in [*self._idle, *self._busy]:
            sock.close()
