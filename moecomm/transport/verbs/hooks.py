"""Posting and polling for the engine's hot loop: machine code over addresses.

``State`` is the memory that both get; its words say where queues, work-request templates and the
library's functions are. One thread uses it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecomm.transport.engine import jit, native
from moecomm.transport.engine.native import ld8, ld32, ld64, st32, st64
from moecomm.transport.engine.provider import MAX_BURST
from moecomm.transport.engine.records import (
    ARRIVED,
    EVENT_BYTES,
    EVENT_CODE,
    EVENT_CONTEXT,
    EVENT_DETAIL,
    EVENT_IMM,
    EVENT_KIND,
    FAILED,
    HAS_IMM,
    POST_BYTES,
    POST_CONTEXT,
    POST_FLAGS,
    POST_IMM,
    POST_KIND,
    POST_LOCAL,
    POST_LOCAL_KEY,
    POST_NBYTES,
    POST_PEER,
    POST_REMOTE,
    POST_REMOTE_KEY,
    RECEIVED,
    SEND,
    SENT,
)
from moecomm.transport.verbs import abi
from moecomm.transport.verbs.abi import (
    RECV_WR_BYTES,
    RECV_WR_NEXT,
    SEND_INLINE,
    SEND_SIGNALED,
    SEND_WR_BYTES,
    SEND_WR_FLAGS,
    SEND_WR_IMM,
    SEND_WR_NEXT,
    SEND_WR_NUM_SGE,
    SEND_WR_OPCODE,
    SEND_WR_REMOTE_ADDR,
    SEND_WR_RKEY,
    SGE_BYTES,
    SGE_LENGTH,
    SGE_LKEY,
    WC_BYTE_LEN,
    WC_BYTES,
    WC_IMM,
    WC_OPCODE,
    WC_RECV_RDMA_WITH_IMM,
    WC_STATUS,
    WC_VENDOR_ERR,
    WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM,
    WR_SEND,
)

POLL_BATCH: Final = 32
# Words of the state.
_POST_SEND: Final = 0
_POST_SRQ_RECV: Final = 8
_POLL_CQ: Final = 16
_CQ: Final = 24
_PEERS: Final = 32  # table of PEER_BYTES: queue pair for writes, queue pair for messages
_REQUESTS: Final = 40  # MAX_BURST send requests, each with its sge
_SGES: Final = 48
_BAD: Final = 56
_COMPLETIONS: Final = 64  # POLL_BATCH of them
_WRITE_SRQ: Final = 72
_EMPTY_RECEIVES: Final = 80  # POLL_BATCH receives of no bytes
_MESSAGE_SRQ: Final = 88
_MESSAGE_RECEIVES: Final = 96  # one request for each message buffer
_MESSAGE_BASE: Final = 104
_MESSAGE_BYTES: Final = 112
_USED: Final = 120  # numbers of message buffers that the program still reads ...
_NUM_USED: Final = 128  # ... and how many: they are posted again at the next poll
_INLINE_BYTES: Final = 136
_LOST: Final = 144  # receives that completed with an error
_STATE_WORDS: Final = 19
PEER_BYTES: Final = 16
# Bits of a request's number (wr_id). Sends have the post's context in the low 32.
EMPTY_RECEIVE: Final = 1 << 62
MESSAGE_RECEIVE: Final = 1 << 61
OWN_REQUEST: Final = 1 << 60  # not the engine's: it gives no event
# In a registration's local key: the processor can read the memory, so small writes may be copied
# into the request.
HOST_MEMORY: Final = 1 << 32

_ENOMEM: Final = 12
_EAGAIN: Final = 11
_EIO: Final = 5
_LOW_32: Final = (1 << 32) - 1

_post_c: Final = native.c_function("i32", "i64", "i64", "i64")
_poll_c: Final = native.c_function("i32", "i64", "i32", "i64")


class State:
    """The memory of ``post`` and ``poll``; keeps everything in it alive.

    Args:
        functions: addresses of the library's post_send, post_srq_recv and poll_cq.
        queue: the completion queue.
        num_peers: most peers.
        writes, messages: the shared receive queues; ``messages`` 0: none.
        inline_bytes: up to which length a queue pair takes payload inside a request.
    """

    def __init__(
        self,
        functions: tuple[int, int, int],
        queue: int,
        num_peers: int,
        writes: int,
        messages: int = 0,
        inline_bytes: int = 0,
    ) -> None:
        self._words = _memory(_STATE_WORDS * 8)
        self._parts: list[NDArray[np.uint8]] = []
        self.address = int(self._words.ctypes.data)
        self._peers = self._part(max(num_peers, 1) * PEER_BYTES)
        for word, value in zip((_POST_SEND, _POST_SRQ_RECV, _POLL_CQ), functions, strict=True):
            self._set(word, value)
        self._set(_CQ, queue)
        self._set(_PEERS, self._peers)
        self._set(_REQUESTS, self._part(MAX_BURST * SEND_WR_BYTES))
        self._set(_SGES, self._part(MAX_BURST * SGE_BYTES))
        self._set(_BAD, self._part(8))
        self._set(_COMPLETIONS, self._part(POLL_BATCH * WC_BYTES))
        self._set(_WRITE_SRQ, writes)
        self._set(_EMPTY_RECEIVES, self._part(POLL_BATCH * RECV_WR_BYTES))
        self._set(_MESSAGE_SRQ, messages)
        self._set(_INLINE_BYTES, inline_bytes)
        self._link_requests()

    def set_peer(self, peer: int, write_qp: int, message_qp: int) -> None:
        """The queue pairs (``ibv_qp``) of ``peer``."""
        place = self._peers + peer * PEER_BYTES
        ctypes.c_uint64.from_address(place).value = write_qp
        ctypes.c_uint64.from_address(place + 8).value = message_qp

    def fill_empty(self, count: int) -> None:
        """Post ``count`` receives of nothing for writes with immediates.

        Raises:
            OSError: the device refuses.
        """
        while count > 0:
            n = min(count, POLL_BATCH)
            _succeed(_post_empty(self.address, n))
            count -= n

    def set_messages(self, base: int, nbytes: int, count: int, key: int) -> None:
        """Receive messages into ``count`` buffers of ``nbytes`` from ``base``.

        Raises:
            OSError: the device refuses.
        """
        requests = self._part(count * RECV_WR_BYTES)
        sges = self._part(count * SGE_BYTES)
        used = self._part(count * 8)
        for n in range(count):
            sge = abi.Sge.from_address(sges + n * SGE_BYTES)
            sge.addr, sge.length, sge.lkey = base + n * nbytes, nbytes, key
            request = abi.RecvWr.from_address(requests + n * RECV_WR_BYTES)
            request.wr_id, request.num_sge = MESSAGE_RECEIVE | n, 1
            request.sg_list = sges + n * SGE_BYTES
            ctypes.c_int64.from_address(used + n * 8).value = n
        self._set(_MESSAGE_RECEIVES, requests)
        self._set(_MESSAGE_BASE, base)
        self._set(_MESSAGE_BYTES, nbytes)
        self._set(_USED, used)
        self._set(_NUM_USED, count)
        _succeed(_post_messages(self.address))

    @property
    def lost(self) -> int:
        """Receives that completed with an error: their connection is broken."""
        return int.from_bytes(self._words[_LOST : _LOST + 8].tobytes(), "little")

    def _link_requests(self) -> None:
        """What never changes in the templates."""
        requests, sges = self._get(_REQUESTS), self._get(_SGES)
        for n in range(MAX_BURST):
            request = abi.SendWr.from_address(requests + n * SEND_WR_BYTES)
            request.sg_list = sges + n * SGE_BYTES
        empty = self._get(_EMPTY_RECEIVES)
        for n in range(POLL_BATCH):
            receive = abi.RecvWr.from_address(empty + n * RECV_WR_BYTES)
            receive.wr_id = EMPTY_RECEIVE
            receive.next = empty + (n + 1) * RECV_WR_BYTES if n + 1 < POLL_BATCH else None

    def _part(self, nbytes: int) -> int:
        part = _memory(nbytes)
        self._parts.append(part)
        return int(part.ctypes.data)

    def _set(self, word: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.address + word).value = value

    def _get(self, word: int) -> int:
        return ctypes.c_uint64.from_address(self.address + word).value


def _succeed(status: int) -> None:
    if status:
        raise OSError(-status, f"ibv_post_srq_recv: {os.strerror(-status)}")


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeros on cache lines of their own."""
    room = np.zeros(nbytes + 64, np.uint8)
    offset = -room.ctypes.data % 64
    return room[offset : offset + nbytes]


@jit.inner
def _swap32(value):  # type: ignore[no-untyped-def]
    """Between the host's and the wire's byte order."""
    return (
        ((value & 0xFF) << 24)
        | ((value & 0xFF00) << 8)
        | ((value >> 8) & 0xFF00)
        | ((value >> 24) & 0xFF)
    )


@jit.inner
def _fill(state, request, sge, post):  # type: ignore[no-untyped-def]
    """Make the n-th send request of the chain from a post."""
    nbytes, key, flags = ld64(post + POST_NBYTES), ld64(post + POST_LOCAL_KEY), SEND_SIGNALED
    st64(sge, ld64(post + POST_LOCAL))
    st32(sge + SGE_LENGTH, nbytes)
    st32(sge + SGE_LKEY, key & _LOW_32)
    st64(request, ld32(post + POST_CONTEXT))
    st32(request + SEND_WR_NUM_SGE, 1 if nbytes > 0 else 0)
    if ld8(post + POST_KIND) == SEND:
        st32(request + SEND_WR_OPCODE, WR_SEND)
    else:
        if ld8(post + POST_FLAGS) & HAS_IMM:
            st32(request + SEND_WR_OPCODE, WR_RDMA_WRITE_WITH_IMM)
            st32(request + SEND_WR_IMM, _swap32(ld32(post + POST_IMM)))
        else:
            st32(request + SEND_WR_OPCODE, WR_RDMA_WRITE)
        st64(request + SEND_WR_REMOTE_ADDR, ld64(post + POST_REMOTE))
        st32(request + SEND_WR_RKEY, ld64(post + POST_REMOTE_KEY))
    if 0 < nbytes <= ld64(state + _INLINE_BYTES) and key & HOST_MEMORY:
        flags |= SEND_INLINE
    st32(request + SEND_WR_FLAGS, flags)


@jit.inner
def _chain(state, posts, count):  # type: ignore[no-untyped-def]
    """Make one chain of the first posts that go to one queue pair; how many those are."""
    requests, sges = ld64(state + _REQUESTS), ld64(state + _SGES)
    peer, kind = ld32(posts + POST_PEER), ld8(posts + POST_KIND)
    n = 0
    while n < count:
        post = posts + n * POST_BYTES
        if ld32(post + POST_PEER) != peer or ld8(post + POST_KIND) != kind:
            break
        request = requests + n * SEND_WR_BYTES
        _fill(state, request, sges + n * SGE_BYTES, post)
        st64(request + SEND_WR_NEXT, request + SEND_WR_BYTES)
        n += 1
    st64(requests + (n - 1) * SEND_WR_BYTES + SEND_WR_NEXT, 0)
    return n


@jit.hook("int64(int64,int64,int64)")
def post(state, posts, count):  # type: ignore[no-untyped-def]
    """See ``moecomm.transport.engine.provider``. One doorbell for each run of posts to a peer."""
    requests, bad = ld64(state + _REQUESTS), ld64(state + _BAD)
    accepted = 0
    while accepted < count:
        first = posts + accepted * POST_BYTES
        n = _chain(state, first, count - accepted)
        st64(bad, requests)
        pair = ld64(state + _PEERS) + ld32(first + POST_PEER) * PEER_BYTES
        if ld8(first + POST_KIND) == SEND:
            pair += 8
        status = _post_c(ld64(state + _POST_SEND), ld64(pair), requests, bad)
        if status != 0:
            accepted += (ld64(bad) - requests) // SEND_WR_BYTES
            if accepted > 0 or status in (_ENOMEM, _EAGAIN):
                return accepted
            return -status if status > 0 else status
        accepted += n
    return accepted


@jit.inner
def _renew_messages(state):  # type: ignore[no-untyped-def]
    """Post the message buffers again that the program has read; 0, or a negative error number."""
    count = ld64(state + _NUM_USED)
    if count == 0:
        return 0
    used, requests = ld64(state + _USED), ld64(state + _MESSAGE_RECEIVES)
    first = requests + ld64(used) * RECV_WR_BYTES
    last = first
    for n in range(1, count):
        request = requests + ld64(used + n * 8) * RECV_WR_BYTES
        st64(last + RECV_WR_NEXT, request)
        last = request
    st64(last + RECV_WR_NEXT, 0)
    status = _post_c(
        ld64(state + _POST_SRQ_RECV), ld64(state + _MESSAGE_SRQ), first, ld64(state + _BAD)
    )
    st64(state + _NUM_USED, 0)
    return -status if status > 0 else status


@jit.inner
def _renew_empty(state, count):  # type: ignore[no-untyped-def]
    """Post ``count`` receives of nothing, at most ``POLL_BATCH``; 0, or a negative error number."""
    if count == 0:
        return 0
    requests = ld64(state + _EMPTY_RECEIVES)
    last = requests + (count - 1) * RECV_WR_BYTES
    st64(last + RECV_WR_NEXT, 0)
    status = _post_c(
        ld64(state + _POST_SRQ_RECV), ld64(state + _WRITE_SRQ), requests, ld64(state + _BAD)
    )
    if count < POLL_BATCH:
        st64(last + RECV_WR_NEXT, last + RECV_WR_BYTES)
    return -status if status > 0 else status


@jit.inner
def _message(state, number, completion, event):  # type: ignore[no-untyped-def]
    """A message came into buffer ``number``: 1 event, or 0 where it came broken."""
    num_used = ld64(state + _NUM_USED)
    st64(ld64(state + _USED) + num_used * 8, number)
    st64(state + _NUM_USED, num_used + 1)
    if ld32(completion + WC_STATUS) != 0:
        st64(state + _LOST, ld64(state + _LOST) + 1)
        return 0
    st32(event + EVENT_KIND, RECEIVED)
    st64(event + EVENT_CONTEXT, ld64(state + _MESSAGE_BASE) + number * ld64(state + _MESSAGE_BYTES))
    st64(event + EVENT_DETAIL, ld32(completion + WC_BYTE_LEN))
    return 1


@jit.inner
def _event(state, completion, event):  # type: ignore[no-untyped-def]
    """Turn a completion into an event; how many (0 or 1)."""
    number, status = ld64(completion), ld32(completion + WC_STATUS)
    if number & MESSAGE_RECEIVE:
        return _message(state, number & _LOW_32, completion, event)
    if number & EMPTY_RECEIVE:
        if status != 0:
            st64(state + _LOST, ld64(state + _LOST) + 1)
            return 0
        if ld32(completion + WC_OPCODE) != WC_RECV_RDMA_WITH_IMM:
            return 0
        st32(event + EVENT_KIND, ARRIVED)
        st32(event + EVENT_IMM, _swap32(ld32(completion + WC_IMM)))
        return 1
    if number & OWN_REQUEST:
        return 0
    st64(event + EVENT_CONTEXT, number)
    st32(event + EVENT_KIND, SENT if status == 0 else FAILED)
    if status != 0:
        st64(event + EVENT_CODE, status)
        st64(event + EVENT_DETAIL, ld32(completion + WC_VENDOR_ERR))
    return 1


@jit.hook("int64(int64,int64,int64)")
def poll(state, events, capacity):  # type: ignore[no-untyped-def]
    """See ``moecomm.transport.engine.provider``."""
    error = _renew_messages(state)
    if error != 0:
        return error
    most = capacity if capacity < POLL_BATCH else POLL_BATCH
    completions = ld64(state + _COMPLETIONS)
    came = _poll_c(ld64(state + _POLL_CQ), ld64(state + _CQ), most, completions)
    if came < 0:
        return -_EIO
    filled, used = 0, 0
    for n in range(came):
        completion = completions + n * WC_BYTES
        if ld64(completion) & EMPTY_RECEIVE:
            used += 1
        filled += _event(state, completion, events + filled * EVENT_BYTES)
    error = _renew_empty(state, used)
    return error if error != 0 else filled


@jit.hot("int64(int64,int64)")
def _post_empty(state, count):  # type: ignore[no-untyped-def]
    return _renew_empty(state, count)


@jit.hot("int64(int64)")
def _post_messages(state):  # type: ignore[no-untyped-def]
    return _renew_messages(state)
