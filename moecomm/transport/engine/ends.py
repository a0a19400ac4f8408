"""Channels that end: what stands in line for a peer, or is in flight to it, fails."""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import piece_done
from moecomm.transport.engine.jit import cold
from moecomm.transport.engine.lines import channel_at, leave_line, place_at, slot_at
from moecomm.transport.engine.native import ld32, ld64, st32, st64


@cold
def end_channel(engine, index, code, detail):
    """The peer gets nothing more by this NIC: whatever stands in line fails."""
    channel = channel_at(engine, index)
    if ld64(channel + S.CH_CODE) == 0:
        st64(channel + S.CH_DETAIL, detail)
        st64(channel + S.CH_CODE, code)
    while ld64(channel + S.CH_FIRST) != 0:
        place = place_at(engine, ld64(channel + S.CH_FIRST))
        op = ld32(place + R.POST_CONTEXT)
        leave_line(engine, channel)
        if code == S.TIMED_OUT:
            piece_done(engine, op, code, detail, index)
        else:
            piece_done(engine, op, S.PEER_FAILED, code, index)


@cold
def lose_posts(engine, index, code):
    """Give up what is in flight on a channel: its operations fail now, and its slots stay taken
    until their events come, if ever."""
    nic = ld64(channel_at(engine, index) + S.CH_NIC)
    for slot in range(ld64(nic + S.NIC_TX_DEPTH)):
        record = slot_at(nic, slot)
        taken = ld32(record + S.SLOT_STATE)
        if taken == S.SLOT_FREE or ld32(record + S.SLOT_CHANNEL) != index:
            continue
        st32(record + S.SLOT_STATE, S.SLOT_LOST)
        if taken == S.SLOT_USER:
            piece_done(engine, ld32(record + S.SLOT_OP), code, 0, index)
