"""One port of an RDMA device as the transfer engine sees it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from moecomm.errors import StateError, TransportError
from moecomm.transport.base import Region
from moecomm.transport.engine.provider import Hooks, Limits, Registration, Sizing
from moecomm.transport.verbs import abi, dmabuf, hooks, statuses
from moecomm.transport.verbs.bootstrap import Address, Bootstrap, DatagramBootstrap, Link
from moecomm.transport.verbs.datagrams import Datagrams
from moecomm.transport.verbs.devices import Device, Port
from moecomm.transport.verbs.domains import Keys, ProtectionDomain
from moecomm.transport.verbs.gids import Gid
from moecomm.transport.verbs.handshake import Card, Name
from moecomm.transport.verbs.library import TRANSPORT
from moecomm.transport.verbs.queues import (
    CompletionQueue,
    Depths,
    Parameters,
    ReliableQueuePair,
    SharedReceiveQueue,
    Target,
    depths,
    same_kind,
)

logger = logging.getLogger(__name__)

INLINE_BYTES: Final = 64
_WORD_BYTES: Final = 8
_READY: Final = 1
_Post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


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


class VerbsNic:
    """An open port (``Nic``): for each peer one reliable queue pair for writes, and, where there
    are messages, one for those, so that neither takes the other's receives.

    Args:
        port: which.
        sizing: see ``Sizing``.
        parameters: of the connections.
        gid_index: see ``Device``.
        bootstrap: makes another bootstrap than datagrams.
    """

    transport = TRANSPORT

    def __init__(
        self,
        port: Port,
        sizing: Sizing,
        *,
        parameters: Parameters | None = None,
        gid_index: int | None = None,
        bootstrap: Callable[[], Bootstrap] | None = None,
    ) -> None:
        self.device = str(port)
        self._sizing, self._parameters = sizing, parameters or Parameters()
        self._pairs: list[tuple[ReliableQueuePair, ReliableQueuePair | None]] = []
        self._seen: Counter[bytes] = Counter()
        self._registrations: dict[int, Keys] = {}
        self._nonce = secrets.token_bytes(8)
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._device = Device(port, gid_index=gid_index)
            stack.callback(self._device.close)
            self._domain = ProtectionDomain(self._device)
            stack.callback(self._domain.close)
            self._open(stack, depths(sizing, self._device.limits, self.device), bootstrap)
            stack.callback(self._close_pairs)
            self._resources = stack.pop_all()

    def _open(
        self,
        stack: contextlib.ExitStack,
        room: Depths,
        bootstrap: Callable[[], Bootstrap] | None,
    ) -> None:
        sizing, domain = self._sizing, self._domain
        self._room = room
        self.limits = Limits(room.posts, room.send, self._device.max_message)
        self._completions = CompletionQueue(self._device, room.completions)
        stack.callback(self._completions.close)
        self._writes = SharedReceiveQueue(domain, room.receive)
        stack.callback(self._writes.close)
        self._messages: SharedReceiveQueue | None = None
        if sizing.num_messages:
            self._messages = SharedReceiveQueue(domain, sizing.num_messages)
            stack.callback(self._messages.close)
        self._words = _Words(domain, sizing.num_peers)
        functions = self._device.post_send, self._device.post_srq_recv, self._device.poll_cq
        self._state = hooks.State(
            functions,
            self._completions.pointer,
            sizing.num_peers,
            self._writes.pointer,
            self._messages.pointer if self._messages is not None else 0,
            INLINE_BYTES,
        )
        self.hooks = Hooks(hooks.post, hooks.poll, self._state.address)
        self._post_receives()
        qp_num = key = 0
        self._bootstrap: Bootstrap
        if bootstrap is None:
            key = secrets.randbits(31)  # the highest bit would mean: the sender's own key
            datagrams = Datagrams(domain, max(64, 4 * sizing.num_peers), key, self._parameters)
            qp_num, self._bootstrap = datagrams.number, DatagramBootstrap(datagrams)
        else:
            self._bootstrap = bootstrap()
        stack.callback(self._bootstrap.close)
        self._address = Address(
            self._nonce,
            self._device.port.roce,
            self._device.gid.raw,
            self._device.lid,
            qp_num,
            key,
        )

    def _post_receives(self) -> None:
        self._state.fill_empty(self._room.receive)
        if self._messages is not None:
            nbytes = -(-self._sizing.message_bytes // 64) * 64
            total = nbytes * self._sizing.num_messages
            self._message_memory = mmap.mmap(-1, total)
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._message_memory))
            keys = self._domain.register(base, total, access=abi.LOCAL_WRITE)
            self._state.set_messages(base, nbytes, self._sizing.num_messages, keys.local)

    def address(self) -> bytes:
        """See ``Nic.address``."""
        return self._address.to_bytes()

    def connect(self, peers: Sequence[bytes], timeout_s: float) -> None:
        """See ``Nic.connect``."""
        if self._closed:
            raise StateError(f"{self.device}: is closed")
        first = len(self._pairs)
        addresses = [self._checked(first + n, data) for n, data in enumerate(peers)]
        links = []
        for address in addresses:
            peer = len(self._pairs)
            pairs = self._make_pairs()
            self._pairs.append(pairs)
            self._state.set_peer(peer, pairs[0].pointer, pairs[1].pointer if pairs[1] else 0)
            if address.nonce == self._nonce:
                self._connect_pairs(peer, self._card(peer))  # to itself
                continue
            name = Name(self._nonce, address.nonce, self._seen[address.nonce])
            self._seen[address.nonce] += 1
            links.append(self._link(peer, name, address))
        self._bootstrap.connect(links, timeout_s)
        logger.info("%s: connected to %d peers", self.device, len(addresses))

    def register(
        self, region: Region, *, on_gpu: bool = False, dmabuf_fd: int | None = None
    ) -> Registration:
        """See ``Nic.register``."""
        where, gpu = (region.address, region.nbytes), self._sizing.cuda_device
        given = dmabuf.DmaBuf(dmabuf_fd, 0) if dmabuf_fd is not None else None
        made = None
        if on_gpu and given is None and gpu is not None:
            made = dmabuf.export(gpu, *where)
        try:
            keys = self._domain.register(*where, dmabuf=given or made, on_gpu=on_gpu)
        finally:
            if made is not None:
                os.close(made.fd)  # the registration keeps what it needs
        # Small payloads may be copied into requests where the processor can read them.
        local = keys.local if on_gpu else keys.local | hooks.HOST_MEMORY
        self._registrations[keys.local] = keys
        return Registration(local, keys.remote, region.address)

    def deregister(self, registration: Registration) -> None:
        """See ``Nic.deregister``."""
        self._domain.deregister(self._registrations.pop(registration.local_key & 0xFFFFFFFF))

    @property
    def lost(self) -> int:
        """Arrivals that completed with an error; their senders learn of it."""
        return self._state.lost

    def explain(self, code: int, detail: int) -> str:
        """See ``Nic.explain``."""
        return statuses.explain(code, detail)

    def close(self) -> None:
        """See ``Nic.close``."""
        if not self._closed:
            self._closed = True
            self._resources.close()

    def _close_pairs(self) -> None:
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
        if peer >= self._sizing.num_peers:
            raise self._refusal(peer, f"is one more than the {self._sizing.num_peers} planned for")
        if address.roce != self._device.port.roce:
            kinds = ("InfiniBand", "Ethernet (RoCE)")
            theirs, ours = kinds[address.roce], kinds[self._device.port.roce]
            raise self._refusal(
                peer, f"is on {theirs}, this port on {ours}; set MOECOMM_RDMA_PORTS"
            )
        if address.roce and not same_kind(mine, address.gid):
            other = Gid(-1, address.gid, mine.kind).address
            raise self._refusal(
                peer,
                f"has the address {other}, this port {mine}: IPv4 and IPv6 do not mix; "
                "set MOECOMM_GID_INDEX",
            )
        return address

    def _refusal(self, peer: int, why: str) -> TransportError:
        return TransportError(
            f"{self.device}: cannot connect to peer {peer}: it {why}",
            transport=TRANSPORT,
            peer=peer,
            operation="connect",
        )

    def _make_pairs(self) -> tuple[ReliableQueuePair, ReliableQueuePair | None]:
        def make(receives: SharedReceiveQueue) -> ReliableQueuePair:
            return ReliableQueuePair(
                self._domain,
                self._completions,
                receives,
                self._room.send,
                secrets.randbits(24),
                INLINE_BYTES,
            )

        messages = make(self._messages) if self._messages is not None else None
        return make(self._writes), messages

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
            error.add_note(f"to peer {peer}, at {Gid(-1, card.gid, '').address}")
            raise

    def _tell_ready(self, peer: int, card: Card) -> None:
        """Write the peer's word, without a completion: should it fail, so will what follows."""
        sge = abi.Sge(self._words.source, _WORD_BYTES, self._words.local_key)
        request = abi.SendWr(
            wr_id=hooks.OWN_REQUEST,
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
            raise statuses.failure(self.device, "the last step of connecting", peer, -abs(status))


@dataclass(frozen=True, slots=True)
class VerbsOpener:
    """A port that is there and not open yet (``NicOpener``); arguments as of ``VerbsNic``."""

    port: Port
    parameters: Parameters = Parameters()
    gid_index: int | None = None
    bootstrap: Callable[[], Bootstrap] | None = None

    transport: ClassVar[str] = TRANSPORT

    @property
    def device(self) -> str:
        return str(self.port)

    def open(self, sizing: Sizing) -> VerbsNic:
        """See ``NicOpener.open``."""
        return VerbsNic(
            self.port,
            sizing,
            parameters=self.parameters,
            gid_index=self.gid_index,
            bootstrap=self.bootstrap,
        )
