"""Small messages: copied into registered memory, sent, and copied out again.

Each rank has ``messages_per_peer`` places for messages to each peer, and every peer as many
receives for it. A place is used again when the peer has taken the message that was in it: the peer
counts what it has taken, and now and then writes the count into this rank's control row.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from moecomm.errors import ConfigError
from moecomm.transport.base import Operation
from moecomm.transport.engine import state as S
from moecomm.transport.engine.build import Memory
from moecomm.transport.engine.operations import Queued
from moecomm.transport.engine.ring import load, store

_HEADER: Final = struct.Struct("<IIQ")  # sender, length, unused


class Messages:
    """Both directions, for all peers.

    Args:
        memory: of the engine.
        rank, num_peers: this one, and all.
        limit: bytes of a message.
        per_peer: messages to one peer that it has not taken.
        send: queue the ``nbytes`` at an offset of the control memory as a message to a peer.
        tell: write the count of messages taken from a peer into its control row.
    """

    def __init__(
        self,
        memory: Memory,
        rank: int,
        num_peers: int,
        limit: int,
        per_peer: int,
        send: Callable[[Queued, int, int, int], None],
        tell: Callable[[int, int], None],
    ) -> None:
        self._memory = memory
        self._rank = rank
        self._limit = limit
        self._per_peer = per_peer
        self._send = send
        self._tell = tell
        self._sent = [0] * num_peers
        self._last: dict[tuple[int, int], Operation] = {}  # of each place
        self._waiting: list[deque[tuple[Queued, bytes]]] = [deque() for _ in range(num_peers)]
        self._taken = [0] * num_peers
        self._received = 0

    def send(self, peer: int, data: bytes, sent: Callable[[], None] | None) -> Queued:
        """See ``TransferEngine.send``."""
        if len(data) > self._limit:
            raise ConfigError(f"data: has {len(data)} bytes; a message has at most {self._limit}")
        operation = Queued("send", 1, len(data), sent)
        self._waiting[peer].append((operation, bytes(data)))
        self.progress()
        return operation

    @property
    def waiting(self) -> int:
        """Messages that wait for a place."""
        return sum(map(len, self._waiting))

    def progress(self) -> int:
        """Send what has a place now; how many."""
        count = 0
        for peer, line in enumerate(self._waiting):
            while line and self._place_is_free(peer):
                operation, data = line.popleft()
                offset = self._memory.message_place(peer, self._sent[peer])
                _HEADER.pack_into(self._memory.control.bytes, offset, self._rank, len(data), 0)
                first = offset + _HEADER.size
                self._memory.control.bytes[first : first + len(data)] = data
                self._last[peer, self._sent[peer] % self._per_peer] = operation
                self._sent[peer] += 1
                self._send(operation, peer, offset, _HEADER.size + len(data))
                count += 1
        return count

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its sender; ``None``: there is none."""
        if load(self._memory.engine + S.MESSAGE_TAIL) == self._received:
            return None
        entry = self._memory.received(self._received)
        sender, length, _ = _HEADER.unpack_from(entry)
        data = bytes(entry[_HEADER.size : _HEADER.size + length])
        self._received += 1
        store(self._memory.engine + S.MESSAGE_HEAD, self._received)
        self._taken[sender] += 1
        self._tell(sender, self._taken[sender])
        return sender, data

    def _place_is_free(self, peer: int) -> bool:
        last = self._last.get((peer, self._sent[peer] % self._per_peer))
        if last is not None and not last.done:
            return False  # the peer has it, and this rank's NIC has not said so yet
        address = self._memory.control.address + self._memory.row(0, peer) + S.ROW_MESSAGES
        return self._sent[peer] - int(load(address)) < self._per_peer
