"""Passing file descriptors between the processes of one machine.

Each rank has a Unix datagram socket with an abstract name: no file, so nothing is left behind and
nothing depends on a shared folder. Names and a password travel through the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Final

from moecomm.errors import PeerTimeout, TransportError

_HEAD: Final = struct.Struct("!16sII")  # password, round, sender's rank
_RETRY_S: Final = 0.001  # a peer's queue is full: it is busy with its own sends


class Mailbox:
    """One rank's socket. ``name`` and ``password`` are for the peers."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._round = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.name = f"moecomm-{secrets.token_hex(16)}"
        self.password = secrets.token_bytes(16)
        self._socket.bind(_address(self.name))
        self._close = weakref.finalize(self, self._socket.close)

    def close(self) -> None:
        """Idempotent."""
        self._close()

    def exchange(
        self, fd: int, peers: Sequence[tuple[str, bytes]], timeout_s: float
    ) -> dict[int, int]:
        """Send ``fd`` to every rank but this one and take theirs: rank → descriptor, which the
        caller closes. ``peers``: name and password of every rank's mailbox. Collective.

        Raises:
            PeerTimeout: a rank has not sent its own in time, ``phase`` is ``"allocate"``.
            TransportError: a peer's mailbox is gone.
        """
        deadline = time.monotonic() + timeout_s
        self._round += 1
        unsent = [rank for rank in range(len(peers)) if rank != self._rank]
        missing = set(unsent)
        got: dict[int, int] = {}
        try:
            while unsent or missing:
                if unsent and self._send(fd, unsent[0], *peers[unsent[0]]):
                    unsent.pop(0)
                    continue
                self._receive(got, missing, _RETRY_S if unsent else deadline - time.monotonic())
                if time.monotonic() > deadline and (unsent or missing):
                    peer = min(missing | set(unsent))
                    raise PeerTimeout("allocate", peer, len(peers), len(got) + 1, rank=self._rank)
        except BaseException:
            close_all(got)
            raise
        return got

    def _send(self, fd: int, peer: int, name: str, password: bytes) -> bool:
        """Whether the peer's queue had room."""
        message = _HEAD.pack(password, self._round, self._rank)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        try:
            self._socket.sendmsg([message], rights, 0, _address(name))
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransportError(
                f"rank {self._rank} cannot pass a file descriptor to rank {peer}: {error}",
                transport="nvlink",
                peer=peer,
                operation="allocate",
                code=error.errno,
            ) from error
        return True

    def _receive(self, got: dict[int, int], missing: set[int], wait_s: float) -> None:
        """Take one message, if one comes; whatever did not come from a peer is thrown away."""
        self._poll.poll(max(0.0, wait_s) * 1000)
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 4)
        except BlockingIOError:
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        if len(message) == _HEAD.size and len(fds) == 1:
            password, number, sender = _HEAD.unpack(message)
            known = secrets.compare_digest(password, self.password)
            if known and number == self._round and sender in missing:
                missing.remove(sender)
                got[sender] = fds[0]
                return
        for fd in fds:
            os.close(fd)


def close_all(fds: dict[int, int]) -> None:
    """Close every descriptor of ``fds`` and forget it."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.popitem()[1])


def _address(name: str) -> str:
    return f"\0{name}"
