"""Posting to and polling libfabric from the engine's loop: two hooks for every provider.

``state`` has the offsets below; ``posting_state.py`` fills it. One ``fi_msg_rma`` and one
``fi_msg`` are templates, used again for every post: providers copy what they need before they
return. Contexts are 64 bytes each, one per slot of the engine, and are the provider's until the
completion.
"""

from __future__ import annotations

from typing import Final

from moecomm.transport.efa import abi as A
from moecomm.transport.engine import records as R
from moecomm.transport.engine.jit import flat, hook, inner
from moecomm.transport.engine.native import c_function, ld8, ld32, ld64, st32, st64

STATE_BYTES: Final = 1024
WRITEMSG: Final = 0  # addresses of the provider's functions
SENDMSG: Final = 8
RECVMSG: Final = 16
CQ_READ: Final = 24
CQ_READERR: Final = 32
EP: Final = 40
CQ: Final = 48
PEERS: Final = 56  # table of fi_addr_t
CONTEXTS: Final = 64  # of posts
NUM_CONTEXTS: Final = 72
MORE: Final = 80  # flag for all posts of a batch but the last; or 0
FLAGS: Final = 88  # for every post
RECEIVES: Final = 96  # contexts of receives
NUM_RECEIVES: Final = 104
RECEIVE_BUFFERS: Final = 112
RECEIVE_BYTES: Final = 120  # of one
RECEIVE_DESC: Final = 128
IDLE: Final = 144  # stack of receives to be posted, u32 each
NUM_IDLE: Final = 152
MSG_RMA: Final = 256  # templates, in place
MSG: Final = 320
IOV: Final = 384
RMA_IOV: Final = 400
DESC: Final = 424
ENTRIES: Final = 448  # of fi_cq_read, 8 of them
MAX_ENTRIES: Final = 8
ERROR: Final = 832  # fi_cq_err_entry

_c_post = c_function("i64", "i64", "i64", "i64")  # writemsg, sendmsg, recvmsg, cq_read, cq_readerr

_REMOTE_WRITE = A.FI_REMOTE_WRITE
_RECV = A.FI_RECV
_IMM_FLAG = A.FI_REMOTE_CQ_DATA
_EAGAIN = -A.FI_EAGAIN
_EAVAIL = -A.FI_EAVAIL


@flat
def _write(state, post, flags):
    message = state + MSG_RMA
    st64(state + IOV + A.IOV_BASE, ld64(post + R.POST_LOCAL))
    st64(state + IOV + A.IOV_LEN, ld64(post + R.POST_NBYTES))
    st64(state + DESC, ld64(post + R.POST_LOCAL_KEY))
    st64(state + RMA_IOV + A.RMA_IOV_ADDR, ld64(post + R.POST_REMOTE))
    st64(state + RMA_IOV + A.RMA_IOV_LEN, ld64(post + R.POST_NBYTES))
    st64(state + RMA_IOV + A.RMA_IOV_KEY, ld64(post + R.POST_REMOTE_KEY))
    st64(message + A.MSG_RMA_ADDR, ld64(ld64(state + PEERS) + ld32(post + R.POST_PEER) * 8))
    context = ld64(state + CONTEXTS) + ld32(post + R.POST_CONTEXT) * A.CONTEXT_BYTES
    st64(message + A.MSG_RMA_CONTEXT, context)
    st64(message + A.MSG_RMA_DATA, ld32(post + R.POST_IMM))
    if ld8(post + R.POST_FLAGS) & R.HAS_IMM:
        flags |= _IMM_FLAG
    return _c_post(ld64(state + WRITEMSG), ld64(state + EP), message, flags)


@inner
def _send(state, post, flags):
    message = state + MSG
    st64(state + IOV + A.IOV_BASE, ld64(post + R.POST_LOCAL))
    st64(state + IOV + A.IOV_LEN, ld64(post + R.POST_NBYTES))
    st64(state + DESC, ld64(post + R.POST_LOCAL_KEY))
    st64(message + A.MSG_ADDR, ld64(ld64(state + PEERS) + ld32(post + R.POST_PEER) * 8))
    context = ld64(state + CONTEXTS) + ld32(post + R.POST_CONTEXT) * A.CONTEXT_BYTES
    st64(message + A.MSG_CONTEXT, context)
    return _c_post(ld64(state + SENDMSG), ld64(state + EP), message, flags)


@hook("int64(int64, int64, int64)")
def POST(state, posts, count):
    """See ``provider.py``."""
    for n in range(count):
        post = posts + n * R.POST_BYTES
        flags = ld64(state + FLAGS)
        if n + 1 < count:
            flags |= ld64(state + MORE)
        if ld8(post + R.POST_KIND) == R.SEND:
            code = _send(state, post, flags)
        else:
            code = _write(state, post, flags)
        if code == _EAGAIN or (code != 0 and n > 0):
            return n
        if code != 0:
            return code
    return count


@inner
def _post_receives(state):
    """Give idle buffers to the provider; a full queue is tried again with the next poll."""
    left = ld64(state + NUM_IDLE)
    while left > 0:
        number = ld32(ld64(state + IDLE) + (left - 1) * 4)
        message = state + MSG
        nbytes = ld64(state + RECEIVE_BYTES)
        st64(state + IOV + A.IOV_BASE, ld64(state + RECEIVE_BUFFERS) + number * nbytes)
        st64(state + IOV + A.IOV_LEN, nbytes)
        st64(state + DESC, ld64(state + RECEIVE_DESC))
        st64(message + A.MSG_ADDR, -1)  # from anybody
        st64(message + A.MSG_CONTEXT, ld64(state + RECEIVES) + number * A.CONTEXT_BYTES)
        code = _c_post(ld64(state + RECVMSG), ld64(state + EP), message, A.FI_COMPLETION)
        if code == _EAGAIN:
            break
        if code != 0:
            return code
        left -= 1
    st64(state + NUM_IDLE, left)
    return 0


@flat
def _slot(state, context):
    """Which post a context belongs to; -1: none."""
    offset = context - ld64(state + CONTEXTS)
    if offset < 0 or offset >= ld64(state + NUM_CONTEXTS) * A.CONTEXT_BYTES:
        return -1
    return offset // A.CONTEXT_BYTES


@inner
def _failed(state, event):
    """Turn an error entry into an event; 1, or the negative error when it is nobody's."""
    error = state + ERROR
    for offset in range(0, A.CQ_ERR_BYTES, 8):
        st64(error + offset, 0)  # err_data_size says how much room err_data has
    read = _c_post(ld64(state + CQ_READERR), ld64(state + CQ), error, 0)
    if read == _EAGAIN:
        return 0
    if read < 0:
        return read
    code = ld32(error + A.CQ_ERR_ERR)
    slot = _slot(state, ld64(error + A.CQ_ERR_CONTEXT))
    if slot < 0:
        return -max(code, 1)
    st32(event + R.EVENT_KIND, R.FAILED)
    st64(event + R.EVENT_CONTEXT, slot)
    st64(event + R.EVENT_CODE, code)
    st64(event + R.EVENT_DETAIL, ld32(error + A.CQ_ERR_PROV_ERRNO))
    return 1


@inner
def _received(state, entry, event):
    number = (ld64(entry + A.CQ_ENTRY_CONTEXT) - ld64(state + RECEIVES)) // A.CONTEXT_BYTES
    if number < 0 or number >= ld64(state + NUM_RECEIVES):
        return False
    st32(event + R.EVENT_KIND, R.RECEIVED)
    buffers = ld64(state + RECEIVE_BUFFERS)
    st64(event + R.EVENT_CONTEXT, buffers + number * ld64(state + RECEIVE_BYTES))
    st64(event + R.EVENT_DETAIL, ld64(entry + A.CQ_ENTRY_LEN))
    idle = ld64(state + NUM_IDLE)
    st32(ld64(state + IDLE) + idle * 4, number)  # posted again with the next poll
    st64(state + NUM_IDLE, idle + 1)
    return True


@flat
def _event(state, entry, event):
    """Turn a completion into an event; whether it makes sense.

    Of the flags only ``FI_REMOTE_WRITE`` and ``FI_RECV`` are the same with all providers, and the
    length of a remote write is not.
    """
    flags = ld64(entry + A.CQ_ENTRY_FLAGS)
    if flags & _REMOTE_WRITE:
        st32(event + R.EVENT_KIND, R.ARRIVED)
        st32(event + R.EVENT_IMM, ld64(entry + A.CQ_ENTRY_DATA))
        return True
    if flags & _RECV:
        return _received(state, entry, event)
    slot = _slot(state, ld64(entry + A.CQ_ENTRY_CONTEXT))
    st32(event + R.EVENT_KIND, R.SENT)
    st64(event + R.EVENT_CONTEXT, slot)
    return slot >= 0


@hook("int64(int64, int64, int64)")
def POLL(state, events, capacity):
    """See ``provider.py``."""
    if ld64(state + NUM_IDLE) > 0:
        code = _post_receives(state)
        if code < 0:
            return code
    filled = 0
    while filled < capacity:
        wanted = min(capacity - filled, MAX_ENTRIES)
        entries = state + ENTRIES
        read = _c_post(ld64(state + CQ_READ), ld64(state + CQ), entries, wanted)
        if read == _EAVAIL:
            one = _failed(state, events + filled * R.EVENT_BYTES)
            if one < 0:
                return one
            filled += one
            continue
        if read == _EAGAIN:
            break
        if read < 0:
            return read
        for n in range(read):
            event = events + (filled + n) * R.EVENT_BYTES
            if not _event(state, entries + n * A.CQ_ENTRY_BYTES, event):
                return -A.FI_EINVAL
        filled += read
        if read < wanted:
            break
    return filled
