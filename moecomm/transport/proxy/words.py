"""Where the mover's records are, and what its immediates say: for its compiled functions."""

from __future__ import annotations

from moecomm.remote_words import EPOCH_BITS, RANK_BITS, SLOT_BITS, Door, Kind
from moecomm.transport.engine.jit import inner
from moecomm.transport.engine.native import ld64, st64
from moecomm.transport.proxy import state as P

# Plain numbers: numba knows no enumerations of this kind.
HEAD, PRIVATE, RECORDS, ROWS, ACK = (int(Kind[d.name]) for d in Door)
ABORT, PING, LEAVE = int(Kind.ABORT), int(Kind.PING), int(Kind.LEAVE)
LOW = (1 << EPOCH_BITS) - 1


@inner
def immediate_of(state, kind, slot, epoch):
    high = (((kind << SLOT_BITS) | slot) << RANK_BITS) | ld64(state + P.RANK)
    return (high << EPOCH_BITS) | (epoch & LOW)


@inner
def slot_at(state, slot):
    return ld64(state + P.SLOTS) + slot * P.SLOT_BYTES


@inner
def pair_at(state, slot, rank):
    return ld64(state + P.PAIRS) + (slot * ld64(state + P.NUM_RANKS) + rank) * P.PAIR_BYTES


@inner
def remote_rank(state, n):
    return ld64(ld64(state + P.REMOTES) + n * 8)


@inner
def has_left(state, rank):
    return ld64(ld64(state + P.LEFT) + rank * 8) != 0


@inner
def plan_at(state, slot, rank):
    place = slot * ld64(state + P.NUM_RANKS) + rank
    return ld64(state + P.PLAN) + place * ld64(state + P.PLAN_BYTES)


@inner
def op_of(state, slot, door):
    return ld64(state + P.FIRST_OP) + slot * P.OPS_A_SLOT + door


@inner
def other_op(state, which):
    return op_of(state, ld64(state + P.NUM_SLOTS), which)


@inner
def add(address, amount):
    st64(address, ld64(address) + amount)
