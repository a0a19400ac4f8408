"""How two ends of a connection learn of each other by datagrams that may be lost, doubled or late.
No I/O here: ``Handshake`` is told what came and asked what to send.

Theory of operation. Each end knows the other's datagram address, makes its queue pairs, and must
get its *card* (numbers of queue pairs, first packet numbers ...) to the other. It repeats

    hello(card, heard=False)

until something comes. When the peer's hello has come, it connects its queue pairs to what the card
says, and from then on its hellos say ``heard=True``: "I have your card, and can receive". An end
that is connected and has read ``heard=True`` is *confirmed*: both directions work, it may send.

    WAITING --peer's hello--> HEARD --connected()--> CONNECTED --heard=True, or ready()--> CONFIRMED

The last hello to an end can be lost, and the sender, confirmed, may have left by then: nobody would
repeat it. So a confirmed end also writes one word to the peer's memory (the card says where), over
the new connection, which is reliable by itself, however busy or absent the software is. Finding the
word (``ready()``) confirms as well.

Every datagram carries both ends' *nonces*, drawn anew for each endpoint, and which of their
connections it is for: what an earlier job left in the network, or sent to a number that is used
again, matches nothing.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

FIRST_INTERVAL_S: Final = 0.01
LONGEST_INTERVAL_S: Final = 0.32
_MAGIC: Final = b"moe1"
_HEARD: Final = 1
_HEAD: Final = struct.Struct("!4sBxxxI8s8s")
_CARD: Final = struct.Struct("!IIIIIH16sQI")


@dataclass(frozen=True, slots=True)
class Card:
    """One end of a connection: two queue pairs (for writes, for messages; number 0: none), where
    the port is, and where the peer shall write its word when it is confirmed."""

    write_qp: int
    write_psn: int
    message_qp: int
    message_psn: int
    mtu: int
    lid: int
    gid: bytes
    ready_address: int
    ready_key: int

    def to_bytes(self) -> bytes:
        """For a datagram, or a store; see ``from_bytes``."""
        return _CARD.pack(
            self.write_qp,
            self.write_psn,
            self.message_qp,
            self.message_psn,
            self.mtu,
            self.lid,
            self.gid,
            self.ready_address,
            self.ready_key,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Card:
        """The inverse of ``to_bytes``."""
        return cls(*_CARD.unpack(data))


@dataclass(frozen=True, slots=True)
class Name:
    """Which connection, as one end sees it: its own nonce, the peer's, and how many connections
    the two had before."""

    mine: bytes
    theirs: bytes
    number: int = 0

    @property
    def reversed(self) -> Name:
        """The same connection, seen from the other end."""
        return Name(self.theirs, self.mine, self.number)


@dataclass(frozen=True, slots=True)
class Hello:
    """The only datagram there is; ``name`` as its sender sees it."""

    name: Name
    card: Card
    heard: bool

    def to_bytes(self) -> bytes:
        flags = _HEARD if self.heard else 0
        head = _HEAD.pack(_MAGIC, flags, self.name.number, self.name.mine, self.name.theirs)
        return head + self.card.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello | None:
        """The inverse of ``to_bytes``; ``None`` for anything else (a stranger's datagram)."""
        if len(data) != HELLO_BYTES or data[:4] != _MAGIC:
            return None
        _, flags, number, mine, theirs = _HEAD.unpack_from(data)
        card = Card.from_bytes(data[_HEAD.size :])
        return cls(Name(mine, theirs, number), card, bool(flags & _HEARD))


HELLO_BYTES: Final = _HEAD.size + _CARD.size


class State(enum.Enum):
    """See the top of this file."""

    WAITING = enum.auto()
    HEARD = enum.auto()
    CONNECTED = enum.auto()
    CONFIRMED = enum.auto()


class Handshake:
    """One end of one connection. Times are seconds of any one clock."""

    def __init__(self, name: Name, card: Card, now: float) -> None:
        self.name = name
        self.card = card
        self.state = State.WAITING
        self.peer_card: Card | None = None
        self._peer_heard = False
        self._next = now
        self._interval = FIRST_INTERVAL_S

    @property
    def confirmed(self) -> bool:
        return self.state is State.CONFIRMED

    @property
    def needs_connecting(self) -> bool:
        """Whether ``peer_card`` has come, and ``connected`` is still to be called."""
        return self.state is State.HEARD

    def receive(self, hello: Hello, now: float) -> None:
        """A hello came whose name, reversed, is ours. Others are refused: ``ValueError``."""
        if hello.name.reversed != self.name:
            raise ValueError(f"a hello for {hello.name.reversed} came to {self.name}")
        self._peer_heard |= hello.heard
        if self.state is State.WAITING:
            self.state, self.peer_card = State.HEARD, hello.card
        elif self.state is State.CONNECTED and self._peer_heard:
            self.state = State.CONFIRMED
        if not hello.heard:
            self._next = now  # it lacks our card, or our "heard": answer, also when confirmed

    def connected(self, now: float) -> None:
        """The queue pairs are connected to what ``peer_card`` says, receives are posted."""
        if self.state is not State.HEARD:
            raise ValueError(f"connected() in state {self.state.name}")
        self.state = State.CONFIRMED if self._peer_heard else State.CONNECTED
        self._next, self._interval = now, FIRST_INTERVAL_S

    def ready(self) -> None:
        """The peer's word was found in memory: it is confirmed, so this end is as well. Before
        this end is connected that cannot be, and means nothing."""
        if self.state is State.CONNECTED:
            self.state = State.CONFIRMED

    def due(self, now: float) -> Hello | None:
        """What to send now, if anything."""
        if now < self._next:
            return None
        if self.state is State.CONFIRMED:
            self._next = float("inf")  # until the peer asks again
        else:
            self._next = now + self._interval
            self._interval = min(2 * self._interval, LONGEST_INTERVAL_S)
        heard = self.state in (State.CONNECTED, State.CONFIRMED)
        return Hello(self.name, self.card, heard)

    def wait_s(self, now: float) -> float:
        """How long nothing is due, unless something comes."""
        return max(0.0, self._next - now)
