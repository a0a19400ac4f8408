"""What the engine asks of a network interface: ``Nic``, and two C functions for the hot loop.

A provider (libfabric, verbs, the tests' fake) has a class with ``open(sizing)`` for every NIC it
offers, and says with addresses of machine code how to post and to poll. Anything with a C calling
convention will do; ours are ``numba.cfunc``, made by ``moecomm.transport.engine.jit.hook``.

``int64 post(int64 state, int64 posts, int64 count)``
    Post work requests: ``count`` records of ``POST_BYTES`` at ``posts``, at most ``MAX_BURST``.
    Returns how many were accepted, from the first on. Fewer than ``count``: the queue is full for
    now, or the next one cannot be posted; the engine polls *all* NICs and comes back. Below 0: the
    *first* one can never be posted, and this is its negative error number; none was accepted.
    Must not wait, retry, or poll: a peer may be waiting for this rank to poll another NIC.

``int64 poll(int64 state, int64 events, int64 capacity)``
    Fill in up to ``capacity`` records of ``EVENT_BYTES``; how many. 0: nothing has happened. Below
    0: the NIC itself is broken, and this is its negative error number. Re-posts consumed receives.

Every accepted post gives exactly one ``SENT`` or ``FAILED``, in any order. A post's ``context`` is
below ``Limits.tx_depth`` and belongs to one post at a time. The payload must stay until then, the
records at ``posts`` need not outlive the call.

The engine keeps these promises: at most ``Limits.tx_depth`` posts without their event on a NIC,
at most ``Limits.peer_depth`` of them to one peer, and never more than ``Sizing.rx_depth`` arrivals
(``ARRIVED`` and ``RECEIVED``) on their way to or waiting in a NIC, over all its peers. So a
completion queue of ``tx_depth + rx_depth`` entries cannot overrun, and ``rx_depth`` posted receives
are always enough.

Threads: ``post`` and ``poll`` run on the engine's worker alone. All methods of ``Nic`` run on
another thread while the worker is stopped or pauses, so a NIC needs no locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moecomm.transport.base import Region

MAX_BURST: Final = 32  # posts in one call: longer bursts put off polling for too long


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a NIC is opened for.

    Args:
        num_peers: the most peers that ``connect`` will be given, this rank included.
        tx_depth: posts in flight that are wished for; a NIC may grant fewer (``Limits``).
        rx_depth: arrivals that must have room; a NIC that has less refuses to open.
        message_bytes: the longest ``SEND``.
        num_messages: the most ``SEND`` on their way to this NIC or not yet taken from it, over all
            peers: so many receives with a buffer are enough. 0: there will be none.
        cuda_device: the GPU whose memory will be registered; ``None``: host memory alone.
    """

    num_peers: int
    tx_depth: int
    rx_depth: int
    message_bytes: int
    num_messages: int
    cuda_device: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What an open NIC can do.

    Args:
        tx_depth: posts in flight over all peers.
        peer_depth: posts in flight to one peer.
        max_bytes: the longest write.
    """

    tx_depth: int
    peer_depth: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """Addresses of the two functions, and what they are passed as ``state``."""

    post: int
    poll: int
    state: int


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that one NIC may use.

    ``remote_base`` stands for the first byte of the region in a peer's ``POST_REMOTE``: its
    address, or 0 where the library counts from the start of the region.
    """

    local_key: int
    remote_key: int
    remote_base: int


class Nic(Protocol):
    """One open network interface: an endpoint that all peers reach."""

    @property
    def transport(self) -> str:
        """For errors: ``"efa"``, ``"verbs"``, ``"tcp"``."""
        ...

    @property
    def device(self) -> str:
        """For errors: what the system calls it, such as ``"mlx5_0"``."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def hooks(self) -> Hooks: ...

    def address(self) -> bytes:
        """What peers pass to ``connect``."""
        ...

    def connect(self, peers: Sequence[bytes], timeout_s: float) -> None:
        """Make ``peers`` reachable and be reachable for them; they get the numbers after those of
        earlier calls. All peers make the matching call at about the same time.

        Raises:
            TransportError: a peer cannot be reached; ``peer`` is its number.
            PeerTimeout: a peer did not answer in time.
        """
        ...

    def register(
        self, region: Region, *, on_gpu: bool = False, dmabuf_fd: int | None = None
    ) -> Registration:
        """Let the NIC read and peers write ``region``: host memory, or with ``on_gpu`` memory of
        ``Sizing.cuda_device``.

        ``dmabuf_fd``: a DMA-BUF of exactly this region, which stays the caller's.

        Raises:
            TransportError: refused; the message says by whom, why, and what to do about it.
        """
        ...

    def deregister(self, registration: Registration) -> None: ...

    def explain(self, code: int, detail: int) -> str:
        """What the numbers of a ``FAILED`` event, or a negative result, mean: one line."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent, waits for nobody. The worker has stopped."""
        ...


class NicOpener(Protocol):
    """A network interface that is there and not open yet."""

    @property
    def transport(self) -> str: ...

    @property
    def device(self) -> str: ...

    def open(self, sizing: Sizing) -> Nic:
        """Open it. Called on the engine's worker thread once that is pinned, so that queues lie in
        the memory of the GPU's NUMA node.

        Raises:
            TransportUnavailable: it cannot be used; the message says what is missing.
        """
        ...
