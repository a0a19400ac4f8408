"""Slots, and lines of commands that cannot go yet.

A command that cannot be posted now (no slot, no credit, a full queue) stands in the line of its
channel, and other channels go on. Lines are lists in one pool; channels that have one are in a
queue, each once, and get their turns from its front.
"""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.jit import cold, flat, inner
from moecomm.transport.engine.native import ld8, ld32, ld64, st32, st64


@flat
def nic_at(engine, nic):
    return ld64(engine + S.NICS) + nic * S.NIC_BYTES


@flat
def channel_at(engine, index):
    return ld64(engine + S.CHANNELS) + index * S.CHANNEL_BYTES


@flat
def copy_post(target, source):
    for offset in range(0, R.POST_BYTES, 8):
        st64(target + offset, ld64(source + offset))


@flat
def causes_arrival(post):
    return ld8(post + R.POST_KIND) == R.SEND or (ld8(post + R.POST_FLAGS) & R.HAS_IMM) != 0


@flat
def is_closed_to(channel, post):
    """Whether the channel has ended, and the post is not one for that very case."""
    return ld64(channel + S.CH_CODE) != 0 and (ld8(post + R.POST_FLAGS) & S.ANYWAY) == 0


@cold
def _enter(engine, index, is_in, queue, tail_at):
    """Put the channel last in a queue that holds each channel once; ``is_in``: where it says so."""
    channel = channel_at(engine, index)
    if ld64(channel + is_in) == 0:
        st64(channel + is_in, 1)
        tail = ld64(engine + tail_at)
        place = tail & (ld64(engine + S.ACTIVE_SIZE) - 1)
        st32(ld64(engine + queue) + place * 4, index)
        st64(engine + tail_at, tail + 1)


@inner
def owe(engine, index):
    """Put the channel into the queue for credit writes."""
    _enter(engine, index, S.CH_OWES, S.CONTROL_QUEUE, S.CONTROL_TAIL)


@inner
def activate(engine, index):
    """Put the channel into the queue of those with a line."""
    _enter(engine, index, S.CH_IS_ACTIVE, S.ACTIVE, S.ACTIVE_TAIL)


# ---- Lines of waiting commands ------------------------------------------------------------------


@flat
def place_at(engine, number):
    """Place ``number`` of the pool, from 1; its link is in POST_SEQUENCE."""
    return ld64(engine + S.WAITING) + (number - 1) * R.POST_BYTES


@inner
def _take_place(engine):
    count = ld64(engine + S.WAITING_COUNT) - 1
    st64(engine + S.WAITING_COUNT, count)
    return ld32(ld64(engine + S.WAITING_FREE) + count * 4)


@cold
def stand_last(engine, index, command):
    """Put a command at the end of its channel's line."""
    channel, number = channel_at(engine, index), _take_place(engine)
    place = place_at(engine, number)
    copy_post(place, command)
    st64(place + R.POST_SEQUENCE, 0)
    if ld64(channel + S.CH_FIRST) == 0:
        st64(channel + S.CH_FIRST, number)
        if ld64(channel + S.CH_IN_FLIGHT) == 0:
            st64(channel + S.CH_SINCE, ld64(engine + S.NOW))
    else:
        st64(place_at(engine, ld64(channel + S.CH_LAST)) + R.POST_SEQUENCE, number)
    st64(channel + S.CH_LAST, number)
    activate(engine, index)


@cold
def stand_first(engine, index, command):
    channel, number = channel_at(engine, index), _take_place(engine)
    place = place_at(engine, number)
    copy_post(place, command)
    st64(place + R.POST_SEQUENCE, ld64(channel + S.CH_FIRST))
    if ld64(channel + S.CH_FIRST) == 0:
        st64(channel + S.CH_LAST, number)
    st64(channel + S.CH_FIRST, number)
    activate(engine, index)


@flat
def leave_line(engine, channel):
    """Remove the first of a line."""
    number = ld64(channel + S.CH_FIRST)
    st64(channel + S.CH_FIRST, ld64(place_at(engine, number) + R.POST_SEQUENCE))
    count = ld64(engine + S.WAITING_COUNT)
    st32(ld64(engine + S.WAITING_FREE) + count * 4, number)
    st64(engine + S.WAITING_COUNT, count + 1)


# ---- Slots --------------------------------------------------------------------------------------


@flat
def slot_at(nic, slot):
    return ld64(nic + S.NIC_SLOTS) + slot * S.SLOT_BYTES


@flat
def free_slot(nic, slot):
    """First in, first out: a completion that comes twice then finds its slot free."""
    st32(slot_at(nic, slot) + S.SLOT_STATE, S.SLOT_FREE)
    tail = ld64(nic + S.NIC_FREE_TAIL)
    st32(ld64(nic + S.NIC_FREE) + (tail & ld64(nic + S.NIC_FREE_MASK)) * 4, slot)
    st64(nic + S.NIC_FREE_TAIL, tail + 1)
