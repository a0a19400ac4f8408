"""What has come: from immediates to ``arrived`` words."""

from __future__ import annotations

from moecomm.remote import CHANNEL_ACK, CHANNEL_HEAD, CHANNEL_RECORDS
from moecomm.remote_words import EPOCH_BITS, RANK_BITS, SLOT_BITS
from moecomm.transport.engine.arrivals import publish
from moecomm.transport.engine.jit import inner
from moecomm.transport.engine.native import ld64, st64
from moecomm.transport.engine.program import next_arrival
from moecomm.transport.proxy import state as P
from moecomm.transport.proxy.landing import note_arrival
from moecomm.transport.proxy.words import (
    ACK,
    HEAD,
    LEAVE,
    LOW,
    PRIVATE,
    RECORDS,
    ROWS,
    add,
    slot_at,
)

_HALF = 1 << (EPOCH_BITS - 1)


@inner
def _raise_arrived(state, slot, source, channel, epoch):
    """``arrived`` words only grow: what comes late does not take one back."""
    place = (slot * ld64(state + P.NUM_RANKS) + source) * ld64(state + P.CHANNELS) + channel
    word = ld64(state + P.ARRIVED) + place * 8
    if ld64(word) < epoch:
        publish(word, epoch)


@inner
def _take(state, imm):
    source = (imm >> EPOCH_BITS) & ((1 << RANK_BITS) - 1)
    slot = (imm >> (EPOCH_BITS + RANK_BITS)) & ((1 << SLOT_BITS) - 1)
    kind = imm >> (EPOCH_BITS + RANK_BITS + SLOT_BITS)
    if source >= ld64(state + P.NUM_RANKS) or slot >= ld64(state + P.NUM_SLOTS):
        add(state + P.STRANGE, 1)
        return
    # A peer is never further from this rank's epoch of the slot than its own write and the
    # acknowledgement that it waits for; so the low bits say which epoch is meant.
    mine = ld64(slot_at(state, slot) + P.SLOT_EPOCH)
    epoch = mine + ((((imm & LOW) - mine + _HALF) & LOW) - _HALF)
    rows = ld64(state + P.CHANNELS) - 1
    if kind == HEAD:
        _raise_arrived(state, slot, source, CHANNEL_HEAD, epoch)
    elif kind == PRIVATE:
        _raise_arrived(state, slot, source, CHANNEL_RECORDS, epoch)
    elif kind == RECORDS:
        _raise_arrived(state, slot, source, CHANNEL_RECORDS + 1, epoch)
    elif kind == ROWS:
        _raise_arrived(state, slot, source, rows, epoch)
        _raise_arrived(state, slot, source, CHANNEL_ACK, epoch)
    elif kind == ACK:
        _raise_arrived(state, slot, source, CHANNEL_ACK, epoch)
    elif kind == LEAVE:
        st64(ld64(state + P.LEFT) + source * 8, 1)
    if kind <= ACK:
        note_arrival(state, slot, source, kind, epoch)
    # ABORT: the word itself has been written to abort_in. PING: its completion is all it is for.


@inner
def take_arrivals(state):
    engine = ld64(state + P.ENGINE)
    count = 0
    arrived = next_arrival(engine)
    while arrived >= 0:
        _take(state, arrived)
        count += 1
        arrived = next_arrival(engine)
    if count > 0:
        add(state + P.SEEN, count)
    return count
