"""One port of an RDMA device as the transfer engine sees it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from moecomm.addresses import IpAddress
from moecomm.errors import StateError
from moecomm.transport.base import Region
from moecomm.transport.engine.provider import Hooks, Limits, Registration, Sizing
from moecomm.transport.verbs import abi, dmabuf, hooks, posting_state, statuses
from moecomm.transport.verbs.bootstrap import Address, Bootstrap, DatagramBootstrap
from moecomm.transport.verbs.datagrams import Datagrams
from moecomm.transport.verbs.devices import Device, Port
from moecomm.transport.verbs.domains import Keys, ProtectionDomain
from moecomm.transport.verbs.library import TRANSPORT
from moecomm.transport.verbs.peers import INLINE_BYTES, Peers, Queues
from moecomm.transport.verbs.queues import (
    CompletionQueue,
    Depths,
    Parameters,
    SharedReceiveQueue,
    depths,
)

logger = logging.getLogger(__name__)

_LOW_32: Final = (1 << 32) - 1


class VerbsNic:
    """An open port (``Nic``).

    Args:
        port: which.
        sizing: see ``Sizing``.
        parameters: of the connections.
        gid_index, near: see ``Device``.
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
        near: Sequence[IpAddress] = (),
        bootstrap: Callable[[], Bootstrap] | None = None,
    ) -> None:
        self.device = str(port)
        self._sizing, self._parameters = sizing, parameters or Parameters()
        self._registrations: dict[int, Keys] = {}
        self._nonce = secrets.token_bytes(8)
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._device = Device(port, gid_index=gid_index, near=near)
            stack.callback(self._device.close)
            self._domain = ProtectionDomain(self._device)
            stack.callback(self._domain.close)
            self._open_queues(stack, depths(sizing, self._device.limits, self.device))
            self._open_peers(stack, bootstrap)
            self._resources = stack.pop_all()

    def _open_queues(self, stack: contextlib.ExitStack, room: Depths) -> None:
        """Everything that the loop polls and posts to, but for the peers."""
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
        functions = self._device.post_send, self._device.post_srq_recv, self._device.poll_cq
        self._state = posting_state.State(
            functions,
            self._completions.pointer,
            sizing.num_peers,
            self._writes.pointer,
            self._messages.pointer if self._messages is not None else 0,
            INLINE_BYTES,
        )
        self.hooks = Hooks(hooks.post, hooks.poll, self._state.address)
        self._post_receives()

    def _open_peers(
        self, stack: contextlib.ExitStack, bootstrap: Callable[[], Bootstrap] | None
    ) -> None:
        """The way to learn of peers, and what they need to know of this end."""
        sizing, domain = self._sizing, self._domain
        qp_num = key = 0
        self._bootstrap: Bootstrap
        if bootstrap is None:
            key = secrets.randbits(31)  # the highest bit would mean: the sender's own key
            datagrams = Datagrams(domain, max(64, 4 * sizing.num_peers), key, self._parameters)
            qp_num, self._bootstrap = datagrams.number, DatagramBootstrap(datagrams)
        else:
            self._bootstrap = bootstrap()
        stack.callback(self._bootstrap.close)
        queues = Queues(domain, self._completions, self._writes, self._messages, self._room.send)
        self._peers = Peers(
            queues, sizing.num_peers, self._parameters, self._nonce, self._state.set_peer
        )
        stack.callback(self._peers.close)
        self._address = Address(
            self._nonce,
            self._device.gid.version if self._device.port.roce else 0,
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
        self._peers.connect(peers, self._bootstrap, timeout_s)
        logger.info("%s: connected to %d peers", self.device, len(peers))

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
        local = keys.local if on_gpu else keys.local | posting_state.HOST_MEMORY
        self._registrations[keys.local] = keys
        return Registration(local, keys.remote, region.address)

    def deregister(self, registration: Registration) -> None:
        """See ``Nic.deregister``."""
        self._domain.deregister(self._registrations.pop(registration.local_key & _LOW_32))

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


@dataclass(frozen=True, slots=True)
class VerbsOpener:
    """A port that is there and not open yet (``NicOpener``); arguments as of ``VerbsNic``."""

    port: Port
    parameters: Parameters = Parameters()
    gid_index: int | None = None
    bootstrap: Callable[[], Bootstrap] | None = None
    near: Sequence[IpAddress] = ()

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
            near=self.near,
            bootstrap=self.bootstrap,
        )
