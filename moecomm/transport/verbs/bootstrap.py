"""Getting the two ends of each connection to know each other: by datagrams, or over a store.

Both are told of ``Link``s, one for each peer, exchange their cards, connect them, and return when
every peer is known to be able to receive.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moecomm.errors import PeerTimeout
from moecomm.store import Store
from moecomm.transport.verbs.datagrams import Datagrams
from moecomm.transport.verbs.handshake import Card, Handshake, Hello, Name

PHASE: Final = "connect"
_NAP_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Address:
    """What peers are told of an open port: who it is (``nonce``), and its datagram endpoint.
    ``roce`` is the version of RoCE that it speaks; 0: InfiniBand."""

    nonce: bytes
    roce: int
    gid: bytes
    lid: int
    qp_num: int
    key: int

    _FORMAT = struct.Struct("!4s8sB16sHII")
    _MAGIC = b"ib02"

    def to_bytes(self) -> bytes:
        return self._FORMAT.pack(
            self._MAGIC, self.nonce, self.roce, self.gid, self.lid, self.qp_num, self.key
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """The inverse; ``ValueError`` for what another version of this package sent."""
        if len(data) != cls._FORMAT.size or data[:4] != cls._MAGIC:
            raise ValueError(f"not an address of this version: {data[:4]!r}, {len(data)} bytes")
        return cls(*cls._FORMAT.unpack(data)[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One connection to be made.

    ``connect`` makes this end's queue pairs ready for the peer's; ``tell_ready`` writes this end's
    word to the peer, and ``is_ready`` says whether the peer's word has come.
    """

    peer: int
    name: Name
    address: Address
    card: Card
    connect: Callable[[Card], None]
    tell_ready: Callable[[Card], None]
    is_ready: Callable[[], bool]


class Bootstrap(Protocol):
    """A way to connect links."""

    def connect(self, links: Sequence[Link], timeout_s: float) -> None:
        """Connect all.

        Raises:
            PeerTimeout: a peer did not answer in time.
            TransportError: a queue pair refuses.
        """
        ...

    def close(self) -> None: ...


class DatagramBootstrap:
    """By datagrams, which may be lost: see ``handshake`` for why it ends well."""

    def __init__(self, datagrams: Datagrams) -> None:
        self._datagrams = datagrams
        self._early: dict[Name, Hello] = {}  # from peers whose connect() came first

    def connect(self, links: Sequence[Link], timeout_s: float) -> None:
        """See ``Bootstrap.connect``."""
        now = time.monotonic()
        deadline = now + timeout_s
        ends = {link.name: (Handshake(link.name, link.card, now), link) for link in links}
        unfinished = dict(ends)
        for name in list(ends):
            hello = self._early.pop(name, None)
            if hello is not None:
                ends[name][0].receive(hello, now)
        while unfinished:
            now = time.monotonic()
            if now > deadline:
                _, link = next(iter(unfinished.values()))
                raise PeerTimeout(PHASE, link.peer, len(ends), len(ends) - len(unfinished))
            came = self._receive(ends, now)
            for name, (handshake, link) in list(unfinished.items()):
                if self._advance(handshake, link, now):
                    del unfinished[name]
            if unfinished and not came:
                time.sleep(_NAP_S)

    def close(self) -> None:
        self._datagrams.close()

    def _receive(self, ends: dict[Name, tuple[Handshake, Link]], now: float) -> int:
        """Hand out what has come, and answer peers that still ask though we are done."""
        came = self._datagrams.receive()
        for data in came:
            hello = Hello.from_bytes(data)
            if hello is None:
                continue
            name = hello.name.reversed
            if name not in ends:
                self._early[name] = hello
                continue
            handshake, link = ends[name]
            handshake.receive(hello, now)
            if handshake.confirmed:
                self._send(handshake, link, now)
        return len(came)

    def _advance(self, handshake: Handshake, link: Link, now: float) -> bool:
        """Do what is due for one connection; whether it is finished."""
        card = handshake.peer_card
        if card is not None and handshake.needs_connecting:
            link.connect(card)
            handshake.connected(now)
        if link.is_ready():
            handshake.ready()
        self._send(handshake, link, now)
        if not handshake.confirmed:
            return False
        assert card is not None
        link.tell_ready(card)
        return True

    def _send(self, handshake: Handshake, link: Link, now: float) -> None:
        hello, to = handshake.due(now), link.address
        if hello is not None:
            self._datagrams.send(hello.to_bytes(), to.lid, to.gid, to.qp_num, to.key)


class StoreBootstrap:
    """Over the store of the ranks' group, where datagrams do not get through.

    Takes O(peers) requests on every rank, one after another. A store reaches whom the ports may
    not reach: so the peer's word must have come, the first that really travels between them.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def connect(self, links: Sequence[Link], timeout_s: float) -> None:
        """See ``Bootstrap.connect``."""
        deadline = time.monotonic() + timeout_s
        cards = []
        for link in links:
            self._store.set(self._key("card", link.name), link.card.to_bytes())
        for step, link in enumerate(links):
            data = self._get("card", link, deadline, len(links), step)
            cards.append(Card.from_bytes(data))
            link.connect(cards[-1])
            self._store.set(self._key("connected", link.name), b"")
        for step, (link, card) in enumerate(zip(links, cards, strict=True)):
            self._get("connected", link, deadline, len(links), step)
            link.tell_ready(card)
            for what in ("card", "connected"):
                self._store.delete(self._key(what, link.name.reversed))
        for step, link in enumerate(links):
            while not link.is_ready():
                if time.monotonic() > deadline:
                    raise PeerTimeout(PHASE, link.peer, len(links), step)
                time.sleep(_NAP_S)

    def close(self) -> None:
        """Nothing to let go of: the store is its group's."""

    def _key(self, what: str, name: Name) -> str:
        return f"{self._prefix}/{name.mine.hex()}/{name.theirs.hex()}/{name.number}/{what}"

    def _get(self, what: str, link: Link, deadline: float, expected: int, seen: int) -> bytes:
        left = max(0.0, deadline - time.monotonic())
        try:
            return self._store.get(self._key(what, link.name.reversed), left)
        except TimeoutError:
            raise PeerTimeout(PHASE, link.peer, expected, seen) from None
