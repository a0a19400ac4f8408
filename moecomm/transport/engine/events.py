"""What NICs tell the loop: writes that are done, immediates and messages that have come."""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import arrive, piece_done
from moecomm.transport.engine.credits import grant
from moecomm.transport.engine.ends import end_channel
from moecomm.transport.engine.jit import cold, flat
from moecomm.transport.engine.lines import channel_at, free_slot, owe, slot_at
from moecomm.transport.engine.native import (
    c_function,
    ld32,
    ld64,
    ld64_acquire,
    st32,
    st64,
    st64_release,
    unlikely,
)
from moecomm.transport.engine.provider import MAX_BURST

_c_poll = c_function("i64", "i64", "i64", "i64")
_c_memcpy = c_function("i64", "i64", "i64", "i64")


@cold
def end_engine(engine, code, detail, nic):
    """The first fault is kept; ``nic``: its record."""
    if ld64(engine + S.FAULT) == 0:
        st64(engine + S.FAULT_DETAIL, detail)
        st64(engine + S.FAULT_NIC, ld64(nic + S.NIC_INDEX))
        st64_release(engine + S.FAULT, code)


@flat
def _completed(engine, nic, event, failed):
    slot = ld64(event + R.EVENT_CONTEXT)
    record = slot_at(nic, slot)
    if slot < 0 or slot >= ld64(nic + S.NIC_TX_DEPTH) or ld32(record + S.SLOT_STATE) == 0:
        end_engine(engine, S.TWICE, slot, nic)
        return
    kind, index = ld32(record + S.SLOT_STATE), ld32(record + S.SLOT_CHANNEL)
    channel = channel_at(engine, index)
    free_slot(nic, slot)
    st64(channel + S.CH_IN_FLIGHT, ld64(channel + S.CH_IN_FLIGHT) - 1)
    st64(channel + S.CH_SINCE, ld64(engine + S.NOW))
    st64(channel + S.CH_SLOW, 0)
    code = detail = 0
    if failed:
        code, detail = max(ld64(event + R.EVENT_CODE), 1), ld64(event + R.EVENT_DETAIL)
    if kind == S.SLOT_USER:
        piece_done(engine, ld32(record + S.SLOT_OP), code, detail, index)
    elif kind == S.SLOT_CONTROL:
        st64(channel + S.CH_BUSY, 0)
        unsaid = ld64(channel + S.CH_SENT) - ld64(channel + S.CH_ANNOUNCED)
        if (
            ld64(channel + S.CH_FIRST) != 0
            or ld64(channel + S.CH_GRANTED) != ld64(channel + S.CH_TOLD_GRANT)
            or unsaid >= ld64(nic + S.NIC_HALF)
        ):
            owe(engine, index)
    if unlikely(failed):
        end_channel(engine, index, code, detail)


@flat
def _arrived(engine, nic, imm):
    inbox = ld64(engine + S.INBOX)
    if inbox == 0:
        if not arrive(engine, imm):
            end_engine(engine, S.NO_MEMORY, 0, nic)
        return
    tail = ld64(engine + S.INBOX_TAIL)
    if unlikely(tail - ld64(engine + S.INBOX_HEAD) >= ld64(engine + S.INBOX_SIZE)):
        end_engine(engine, S.INBOX_OVERRUN, imm, nic)
        return
    st32(inbox + (tail & (ld64(engine + S.INBOX_SIZE) - 1)) * 4, imm)
    st64(engine + S.INBOX_TAIL, tail + 1)


@cold
def _received(engine, nic, event):
    """Copy a message into the ring that Python empties."""
    tail, size = ld64(engine + S.MESSAGE_TAIL), ld64(engine + S.MESSAGES_SIZE)
    nbytes, room = ld64(event + R.EVENT_DETAIL), ld64(engine + S.MESSAGE_BYTES)
    if tail - ld64_acquire(engine + S.MESSAGE_HEAD) >= size or nbytes > room:
        end_engine(engine, S.MESSAGE_OVERRUN, nbytes, nic)
        return
    entry = ld64(engine + S.MESSAGES) + (tail & (size - 1)) * room
    _c_memcpy(ld64(engine + S.MEMCPY), entry, ld64(event + R.EVENT_CONTEXT), nbytes)
    st64_release(engine + S.MESSAGE_TAIL, tail + 1)


@flat
def poll(engine, nic):
    """Take what a NIC has to tell."""
    events = ld64(nic + S.NIC_EVENTS)
    count = _c_poll(ld64(nic + S.NIC_POLL), ld64(nic + S.NIC_STATE), events, MAX_BURST)
    if count > 0:
        st64(engine + S.IDLE, S.BUSY)
        _take(engine, nic, events, count)
    elif unlikely(count < 0):
        end_engine(engine, S.NIC_BROKEN, -count, nic)


@flat
def _take(engine, nic, event, count):
    end, arrivals = event + count * R.EVENT_BYTES, 0
    while event < end:
        kind = ld32(event + R.EVENT_KIND)
        if kind == R.ARRIVED:
            arrivals += 1
            _arrived(engine, nic, ld32(event + R.EVENT_IMM))
        elif unlikely(kind == R.RECEIVED):
            arrivals += 1
            _received(engine, nic, event)
        else:
            _completed(engine, nic, event, kind == R.FAILED)
        event += R.EVENT_BYTES
    if arrivals > 0:
        arrivals += ld64(nic + S.NIC_ARRIVALS)
        st64(nic + S.NIC_ARRIVALS, arrivals)
        if unlikely(arrivals > ld64(nic + S.NIC_SCAN_AT)):
            grant(engine, nic)
