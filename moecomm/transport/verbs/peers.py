"""The connections of one port: to each peer a queue pair for writes and, where there are messages,
one for those, so that neither takes the other's receives."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from moecomm.errors import PeerTimeout, TransportError
from moecomm.transport.verbs import abi, posting_state, statuses, structures
from moecomm.transport.verbs.bootstrap import Address, Bootstrap, Link
from moecomm.transport.verbs.domains import ProtectionDomain
from moecomm.transport.verbs.gids import Gid
from moecomm.transport.verbs.handshake import Card, Name
from moecomm.transport.verbs.library import TRANSPORT
from moecomm.transport.verbs.queues import (
    CompletionQueue,
    Parameters,
    ReliableQueuePair,
    SharedReceiveQueue,
    Target,
    same_kind,
)

INLINE_BYTES: Final = 64
_PSN_BITS: Final = 24
_WORD_BYTES: Final = 8
_READY: Final = 1
_Post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Queues:
    """What the connections share, and ``depth``: of the send queue of each."""

    domain: ProtectionDomain
    completions: CompletionQueue
    writes: SharedReceiveQueue
    messages: SharedReceiveQueue | None
    depth: int


class _Words:
    """A word for each peer, which that peer sets when it is ready, and one to send from."""

    def __init__(self, domain: ProtectionDomain, count: int) -> None:
        nbytes = -(-(count + 1) * _WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, nbytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        keys = domain.register(self._base, nbytes)
        self.local_key, self.remote_key = keys.local, keys.remote
        self.source = self.address(count)
        ctypes.c_uint64.from_address(self.source).value = _READY

    def address(self, peer: int) -> int:
        return self._base + peer * _WORD_BYTES

    def is_set(self, peer: int) -> bool:
        return ctypes.c_uint64.from_address(self.address(peer)).value == _READY


class Peers:
    """Connections, numbered in the order in which they are asked for.

    Args:
        queues: see ``Queues``.
        most: how many there may be.
        parameters: of the connections.
        nonce: what peers know this port by.
        added: told of each new number with its queue pairs (``ibv_qp``; 0: none for messages).
    """

    def __init__(
        self,
        queues: Queues,
        most: int,
        parameters: Parameters,
        nonce: bytes,
        added: Callable[[int, int, int], None],
    ) -> None:
        self._queues, self._device = queues, queues.domain.device
        self._where = queues.domain.where
        self._most, self._parameters, self._nonce = most, parameters, nonce
        self._added = added
        self._pairs: list[tuple[ReliableQueuePair, ReliableQueuePair | None]] = []
        self._seen: Counter[bytes] = Counter()
        self._words = _Words(queues.domain, most)

    def connect(self, peers: Sequence[bytes], bootstrap: Bootstrap, timeout_s: float) -> None:
        """See ``Nic.connect``."""
        first = len(self._pairs)
        addresses = [self._checked(first + n, data) for n, data in enumerate(peers)]
        links = []
        for address in addresses:
            peer = len(self._pairs)
            pairs = self._make_pairs()
            self._pairs.append(pairs)
            self._added(peer, pairs[0].pointer, pairs[1].pointer if pairs[1] else 0)
            if address.nonce == self._nonce:
                self._connect_pairs(peer, self._card(peer))  # to itself
                continue
            name = Name(self._nonce, address.nonce, self._seen[address.nonce])
            self._seen[address.nonce] += 1
            links.append(self._link(peer, name, address))
        try:
            bootstrap.connect(links, timeout_s)
        except PeerTimeout as error:
            self._add_way(error, addresses[(error.peer or 0) - first].gid)
            raise

    def close(self) -> None:
        """Idempotent. What is under way is dropped."""
        for pairs in self._pairs:
            for pair in pairs:
                if pair is not None:
                    pair.close()

    def _checked(self, peer: int, data: bytes) -> Address:
        """A peer's address, unless no connection to it can work."""
        mine = self._device.gid
        try:
            address = Address.from_bytes(data)
        except ValueError as error:
            raise self._refusal(peer, f"runs another version of moecomm ({error})") from None
        if peer >= self._most:
            raise self._refusal(peer, f"is one more than the {self._most} planned for")
        if bool(address.roce) != self._device.port.roce:
            kinds = ("InfiniBand", "Ethernet (RoCE)")
            theirs, ours = kinds[bool(address.roce)], kinds[self._device.port.roce]
            raise self._refusal(
                peer, f"is on {theirs}, this port on {ours}; set MOECOMM_RDMA_PORTS"
            )
        other = Gid(-1, address.gid, mine.kind).address
        if address.roce and address.roce != mine.version:
            raise self._refusal(
                peer,
                f"speaks RoCE v{address.roce} at {other}, this port {mine}: versions do not mix; "
                "set MOECOMM_GID_INDEX",
            )
        if address.roce and not same_kind(mine, address.gid):
            raise self._refusal(
                peer,
                f"has the address {other}, this port {mine}: IPv4 and IPv6 do not mix; "
                "set MOECOMM_GID_INDEX",
            )
        return address

    def _refusal(self, peer: int, why: str) -> TransportError:
        return TransportError(
            f"{self._where}: cannot connect to peer {peer}: it {why}",
            transport=TRANSPORT,
            peer=peer,
            operation="connect",
        )

    def _add_way(self, error: TransportError, to: bytes) -> None:
        """Say which way the connection was to take, and which others there are."""
        gid = self._device.gid
        text = f"{error}; {self._where} is {gid}, the peer {Gid(-1, to, gid.kind).address}"
        others = ", ".join(str(other) for other in self._device.gids if other != gid)
        if self._device.port.roce and others:
            text += (
                f"; if packets do not get from one to the other, set MOECOMM_GID_INDEX: {others}"
            )
        error.args = (text,)

    def _make_pairs(self) -> tuple[ReliableQueuePair, ReliableQueuePair | None]:
        queues = self._queues

        def make(receives: SharedReceiveQueue) -> ReliableQueuePair:
            return ReliableQueuePair(
                queues.domain,
                queues.completions,
                receives,
                queues.depth,
                secrets.randbits(_PSN_BITS),
                INLINE_BYTES,
            )

        messages = make(queues.messages) if queues.messages is not None else None
        return make(queues.writes), messages

    def _card(self, peer: int) -> Card:
        writes, messages = self._pairs[peer]
        return Card(
            write_qp=writes.number,
            write_psn=writes.psn,
            message_qp=messages.number if messages is not None else 0,
            message_psn=messages.psn if messages is not None else 0,
            mtu=self._device.mtu,
            lid=self._device.lid,
            gid=self._device.gid.raw,
            ready_address=self._words.address(peer),
            ready_key=self._words.remote_key,
        )

    def _link(self, peer: int, name: Name, address: Address) -> Link:
        return Link(
            peer=peer,
            name=name,
            address=address,
            card=self._card(peer),
            connect=lambda card: self._connect_pairs(peer, card),
            tell_ready=lambda card: self._tell_ready(peer, card),
            is_ready=lambda: self._words.is_set(peer),
        )

    def _connect_pairs(self, peer: int, card: Card) -> None:
        writes, messages = self._pairs[peer]
        place = card.mtu, card.lid, card.gid
        try:
            writes.connect(Target(card.write_qp, card.write_psn, *place), self._parameters)
            if messages is not None:
                target = Target(card.message_qp, card.message_psn, *place)
                messages.connect(target, self._parameters)
        except TransportError as error:
            error.peer = peer
            self._add_way(error, card.gid)
            raise

    def _tell_ready(self, peer: int, card: Card) -> None:
        """Write the peer's word, without a completion: should it fail, so will what follows."""
        sge = structures.Sge(self._words.source, _WORD_BYTES, self._words.local_key)
        request = structures.SendWr(
            wr_id=posting_state.OWN_REQUEST,
            sg_list=ctypes.addressof(sge),
            num_sge=1,
            opcode=abi.WR_RDMA_WRITE,
            ah=card.ready_address,  # the same place as a write's remote address ...
            remote_qpn=card.ready_key,  # ... and its key
        )
        bad = ctypes.c_void_p()
        pair = self._pairs[peer][0]
        post = _Post(self._device.post_send)
        status = post(pair.pointer, ctypes.addressof(request), ctypes.addressof(bad))
        if status:
            raise statuses.failure(self._where, "the last step of connecting", peer, -abs(status))
