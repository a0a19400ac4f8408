"""Whether all has come that a receiving half takes, for streams of the GPU that wait for that."""

from __future__ import annotations

from moecomm.remote import CHANNEL_HEAD, CHANNEL_RECORDS, HALVES
from moecomm.remote_words import FREE, TICKET_BITS, TICKETS
from moecomm.transport.engine.jit import inner
from moecomm.transport.engine.native import ld64, ld64_acquire, st64, st64_release
from moecomm.transport.proxy import state as P
from moecomm.transport.proxy.words import RECORDS, add, pair_at, slot_at

_DISPATCH, _COMBINE = 0, 1
_TICKET_LOW = (1 << TICKET_BITS) - 1
_TICKET_MIDDLE = 1 << (TICKET_BITS - 1)


@inner
def _half_at(state, slot, half):
    return slot_at(state, slot) + P.SLOT_HALVES + half * P.HALF_BYTES


@inner
def _records_here(state, slot, source, epoch):
    """Whether a rank's head is there, and all records that it speaks of."""
    place = slot * ld64(state + P.NUM_RANKS) + source
    arrived = ld64(state + P.ARRIVED) + place * ld64(state + P.CHANNELS) * 8
    if ld64(arrived + CHANNEL_HEAD * 8) < epoch:
        return False
    head = ld64(state + P.BULK) + ld64(state + P.IN_HEAD) + place * ld64(state + P.HEAD_BYTES)
    count = ld64(head + ld64(state + P.HEAD_SHARE)) & 0xFFFFFFFF
    if count > 0 and ld64(arrived + CHANNEL_RECORDS * 8) < epoch:
        return False
    return count <= ld64(state + P.PRIVATE) or ld64(arrived + (CHANNEL_RECORDS + 1) * 8) >= epoch


@inner
def note_arrival(state, slot, source, kind, epoch):
    """Something of this kind has come. All of a half is there with its last remote rank's part; one
    that owes no rows may send an acknowledgement alone."""
    half = _DISPATCH if kind <= RECORDS else _COMBINE
    sent = pair_at(state, slot, source) + P.PAIR_SENT + half * 8
    if ld64(sent) >= epoch:
        return
    if half == _DISPATCH and not _records_here(state, slot, source, epoch):
        return
    st64(sent, epoch)
    record = _half_at(state, slot, half)
    if ld64(record + P.HALF_EPOCH) > epoch:
        return
    if ld64(record + P.HALF_EPOCH) != epoch:
        st64(record + P.HALF_EPOCH, epoch)
        st64(record + P.HALF_COUNT, 0)
    add(record + P.HALF_COUNT, 1)
    if ld64(record + P.HALF_COUNT) == ld64(state + P.NUM_REMOTES):
        st64(record + P.HALF_DONE, epoch)


@inner
def _tell(state, slot, half, now):
    record = _half_at(state, slot, half)
    place = slot * ld64(state + P.DOOR_BYTES) + (TICKETS + half) * 8
    ticket = ld64_acquire(ld64(state + P.DOOR) + place)
    if ticket != ld64(record + P.HALF_TICKET):
        st64(record + P.HALF_TICKET, ticket)
        st64(record + P.HALF_SINCE, now)
    word = ld64(state + P.LANDED) + (slot * HALVES + half) * 8
    number = ticket >> TICKET_BITS
    if number <= ld64(word):
        return
    # Of both epochs the low bits are compared.
    ahead = (ticket - ld64(record + P.HALF_DONE)) & _TICKET_LOW
    late = now - ld64(record + P.HALF_SINCE) > ld64(state + P.PATIENCE_NS)
    if ahead == 0 or ahead >= _TICKET_MIDDLE or late:
        st64_release(word, number)


@inner
def tell_streams(state, slot, now):
    """Wake those for whose epoch everything has come, and those that have waited for too long."""
    for half in range(HALVES):
        _tell(state, slot, half, now)


@inner
def wake_streams(state):
    """All of them, for good."""
    for n in range(ld64(state + P.NUM_SLOTS) * HALVES):
        word = ld64(state + P.LANDED) + n * 8
        if ld64(word) != FREE:
            st64_release(word, FREE)
