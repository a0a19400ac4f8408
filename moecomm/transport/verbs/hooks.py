"""Posting and polling for the engine's hot loop: machine code over addresses.

Both get ``posting_state.State``, whose words say where queues, work-request templates and the
library's functions are. One thread uses it.
"""

from __future__ import annotations

from typing import Final

from moecomm.transport.engine import jit, native
from moecomm.transport.engine.native import ld8, ld32, ld64, st32, st64
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
from moecomm.transport.verbs import posting_state as S
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

_ENOMEM: Final = 12
_EAGAIN: Final = 11
_EIO: Final = 5
_LOW_32: Final = (1 << 32) - 1

_post_c: Final = native.c_function("i32", "i64", "i64", "i64")
_poll_c: Final = native.c_function("i32", "i64", "i32", "i64")


@jit.flat
def _swap32(value):  # type: ignore[no-untyped-def]
    """Between the host's and the wire's byte order."""
    return (
        ((value & 0xFF) << 24)
        | ((value & 0xFF00) << 8)
        | ((value >> 8) & 0xFF00)
        | ((value >> 24) & 0xFF)
    )


@jit.flat
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
    if 0 < nbytes <= ld64(state + S.INLINE_BYTES) and key & S.HOST_MEMORY:
        flags |= SEND_INLINE
    st32(request + SEND_WR_FLAGS, flags)


@jit.flat
def _chain(state, posts, count):  # type: ignore[no-untyped-def]
    """Make one chain of the first posts that go to one queue pair; how many those are."""
    requests, sges = ld64(state + S.REQUESTS), ld64(state + S.SGES)
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
    requests, bad = ld64(state + S.REQUESTS), ld64(state + S.BAD)
    accepted = 0
    while accepted < count:
        first = posts + accepted * POST_BYTES
        n = _chain(state, first, count - accepted)
        st64(bad, requests)
        pair = ld64(state + S.PEERS) + ld32(first + POST_PEER) * S.PEER_BYTES
        if ld8(first + POST_KIND) == SEND:
            pair += 8
        status = _post_c(ld64(state + S.POST_SEND), ld64(pair), requests, bad)
        if status != 0:
            accepted += (ld64(bad) - requests) // SEND_WR_BYTES
            if accepted > 0 or status in (_ENOMEM, _EAGAIN):
                return accepted
            return -status if status > 0 else status
        accepted += n
    return accepted


@jit.flat
def _renew_messages(state):  # type: ignore[no-untyped-def]
    """Post the message buffers again that the program has read; 0, or a negative error number."""
    count = ld64(state + S.NUM_USED)
    if count == 0:
        return 0
    used, requests = ld64(state + S.USED), ld64(state + S.MESSAGE_RECEIVES)
    first = requests + ld64(used) * RECV_WR_BYTES
    last = first
    for n in range(1, count):
        request = requests + ld64(used + n * 8) * RECV_WR_BYTES
        st64(last + RECV_WR_NEXT, request)
        last = request
    st64(last + RECV_WR_NEXT, 0)
    status = _post_c(
        ld64(state + S.POST_SRQ_RECV), ld64(state + S.MESSAGE_SRQ), first, ld64(state + S.BAD)
    )
    st64(state + S.NUM_USED, 0)
    return -status if status > 0 else status


@jit.flat
def _renew_empty(state):  # type: ignore[no-untyped-def]
    """Post as many receives of nothing as were used up; 0, or a negative error number."""
    count = ld64(state + S.NUM_EMPTY)
    if count == 0:
        return 0
    st64(state + S.NUM_EMPTY, 0)
    requests = ld64(state + S.EMPTY_RECEIVES)
    last = requests + (count - 1) * RECV_WR_BYTES
    st64(last + RECV_WR_NEXT, 0)
    status = _post_c(
        ld64(state + S.POST_SRQ_RECV), ld64(state + S.WRITE_SRQ), requests, ld64(state + S.BAD)
    )
    if count < S.POLL_BATCH:
        st64(last + RECV_WR_NEXT, last + RECV_WR_BYTES)
    return -status if status > 0 else status


@jit.inner
def _renew(state):  # type: ignore[no-untyped-def]
    """Post all receives again that were used up; 0, or a negative error number."""
    error = _renew_empty(state)
    return error if error != 0 else _renew_messages(state)


@jit.inner
def _message(state, number, completion, event):  # type: ignore[no-untyped-def]
    """A message came into buffer ``number``: 1 event, or 0 where it came broken."""
    num_used = ld64(state + S.NUM_USED)
    st64(ld64(state + S.USED) + num_used * 8, number)
    st64(state + S.NUM_USED, num_used + 1)
    if ld32(completion + WC_STATUS) != 0:
        st64(state + S.LOST, ld64(state + S.LOST) + 1)
        return 0
    st32(event + EVENT_KIND, RECEIVED)
    st64(
        event + EVENT_CONTEXT, ld64(state + S.MESSAGE_BASE) + number * ld64(state + S.MESSAGE_BYTES)
    )
    st64(event + EVENT_DETAIL, ld32(completion + WC_BYTE_LEN))
    return 1


@jit.flat
def _event(state, completion, event):  # type: ignore[no-untyped-def]
    """Turn a completion into an event; how many (0 or 1)."""
    number, status = ld64(completion), ld32(completion + WC_STATUS)
    if number & S.MESSAGE_RECEIVE:
        return _message(state, number & _LOW_32, completion, event)
    if number & S.EMPTY_RECEIVE:
        st64(state + S.NUM_EMPTY, ld64(state + S.NUM_EMPTY) + 1)
        if status != 0:
            st64(state + S.LOST, ld64(state + S.LOST) + 1)
            return 0
        if ld32(completion + WC_OPCODE) != WC_RECV_RDMA_WITH_IMM:
            return 0
        st32(event + EVENT_KIND, ARRIVED)
        st32(event + EVENT_IMM, _swap32(ld32(completion + WC_IMM)))
        return 1
    if number & S.OWN_REQUEST:
        return 0
    st64(event + EVENT_CONTEXT, number)
    st32(event + EVENT_KIND, SENT if status == 0 else FAILED)
    if status != 0:
        st64(event + EVENT_CODE, status)
        st64(event + EVENT_DETAIL, ld32(completion + WC_VENDOR_ERR))
    return 1


@jit.hook("int64(int64,int64,int64)")
def poll(state, events, capacity):  # type: ignore[no-untyped-def]
    """See ``moecomm.transport.engine.provider``.

    Receives are posted again with the next poll: by then an answer to what came is on its way.
    """
    if native.unlikely((ld64(state + S.NUM_EMPTY) | ld64(state + S.NUM_USED)) != 0):
        error = _renew(state)
        if error != 0:
            return error
    most = capacity if capacity < S.POLL_BATCH else S.POLL_BATCH
    completions = ld64(state + S.COMPLETIONS)
    came = _poll_c(ld64(state + S.POLL_CQ), ld64(state + S.CQ), most, completions)
    if came < 0:
        return -_EIO
    filled = 0
    for n in range(came):
        filled += _event(state, completions + n * WC_BYTES, events + filled * EVENT_BYTES)
    return filled
