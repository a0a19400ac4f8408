"""What goes wrong: writes that fail, peers that are silent, ranks that have given up."""

from __future__ import annotations

from moecomm.remote import CHANNEL_ACK
from moecomm.transport.engine.arrivals import publish
from moecomm.transport.engine.jit import inner
from moecomm.transport.engine.native import ld64, ld64_acquire, st64, st64_release
from moecomm.transport.engine.program import (
    begin,
    clock_ns,
    error_of,
    has_failed,
    is_done,
    room,
    write,
)
from moecomm.transport.proxy import state as P
from moecomm.transport.proxy.sending import nic_for, post
from moecomm.transport.proxy.words import (
    ABORT,
    PING,
    add,
    has_left,
    immediate_of,
    op_of,
    other_op,
    remote_rank,
    slot_at,
)

PHASE_OF_SENDING, PHASE_OF_RECEIVING, PHASE_OF_RETURNING = 0, 1, 2  # protocol.cuh


@inner
def _culprit(state):
    """The remote rank that the engine no longer reaches and that has not left; -1: none."""
    for n in range(ld64(state + P.NUM_REMOTES)):
        rank = remote_rank(state, n)
        if not has_left(state, rank) and has_failed(ld64(state + P.ENGINE), rank) != 0:
            return rank
    return -1


@inner
def blame(state, phase, rank, code):
    """This rank cannot go on, because of ``rank``: its kernels shall stop."""
    st64(state + P.CULPRIT_CODE, code)
    st64_release(state + P.CULPRIT, rank + 1)
    if ld64(ld64(state + P.ABORT_IN)) == 0:
        word = (-1 << 63) | (phase << 32) | (ld64(state + P.RANK) << 16) | rank
        publish(ld64(state + P.ABORT_IN), word)


@inner
def _check(state, op, phase):
    """Look at an operation; whether it is done."""
    engine = ld64(state + P.ENGINE)
    if error_of(engine, op) != 0 and ld64(state + P.CULPRIT) == 0:
        rank = _culprit(state)
        if rank >= 0:
            blame(state, phase, rank, has_failed(engine, rank))
    return is_done(engine, op)


@inner
def check_slot(state, slot):
    record = slot_at(state, slot)
    opened = ld64(record + P.SLOT_OPEN)
    if opened == 0:
        return
    for door in range(P.OPS_A_SLOT):
        if (opened >> door) & 1 == 0:
            continue
        phase = PHASE_OF_SENDING if door < P.RETURN else PHASE_OF_RETURNING
        if _check(state, op_of(state, slot, door), phase):
            opened &= ~(1 << door)
            since = ld64(record + P.SLOT_POSTED + door * 8)
            add(state + P.MOVE_NS + door * 8, clock_ns(ld64(state + P.ENGINE)) - since)
    st64(record + P.SLOT_OPEN, opened)


@inner
def tell_all(state, op, kind):
    """A write of nothing, or of the abort word, to every remote peer that is there."""
    engine, count = ld64(state + P.ENGINE), 0
    for n in range(ld64(state + P.NUM_REMOTES)):
        if not has_left(state, remote_rank(state, n)):
            count += 1
    begin(engine, op, count)
    for n in range(ld64(state + P.NUM_REMOTES)):
        rank = remote_rank(state, n)
        if has_left(state, rank):
            continue
        if kind != ABORT:
            post(state, op, kind, rank, 0, 0, 0, immediate_of(state, kind, 0, 0))
            continue
        nic = nic_for(state, rank, kind)
        peer = ld64(state + P.PEERS) + (rank * ld64(state + P.NUM_NICS) + nic) * P.PEER_BYTES
        source = ld64(state + P.ABORT_OUT)
        if ld64(source) == 0:
            source = ld64(state + P.ABORT_IN)
        key, imm = ld64(ld64(state + P.FLAG_KEYS) + nic * 8), immediate_of(state, kind, 0, 0)
        remote, remote_key = ld64(peer + P.PEER_ABORT_IN), ld64(peer + P.PEER_FLAG_KEY)
        write(engine, op, nic, rank, source, key, 8, remote, remote_key, imm)
        add(state + P.WRITES + kind * 8, 1)
        add(state + P.NBYTES + kind * 8, 8)


@inner
def given_up(state):
    """Whether somebody has: this rank's kernels, its mover, or a peer. The peers are told once,
    also of what another peer has said: it may not reach all of them."""
    if ld64(state + P.TOLD) != 0:
        return True
    word = ld64_acquire(ld64(state + P.ABORT_OUT))
    if word == 0:
        word = ld64_acquire(ld64(state + P.ABORT_IN))
    if word == 0:
        return False
    if room(ld64(state + P.ENGINE)) >= ld64(state + P.NUM_REMOTES):
        tell_all(state, other_op(state, P.OP_ABORT), ABORT)
        st64(state + P.ABORT_WORD, word)
        st64(state + P.TOLD, 1)
    return True


@inner
def _waits(state):
    """Whether kernels may be waiting for a remote peer: amid an epoch, or for the last one's
    acknowledgements."""
    ranks, channels = ld64(state + P.NUM_RANKS), ld64(state + P.CHANNELS)
    for slot in range(ld64(state + P.NUM_SLOTS)):
        record = slot_at(state, slot)
        if ld64(record + P.SLOT_STAGE) != 0:
            return True
        for n in range(ld64(state + P.NUM_REMOTES)):
            rank = remote_rank(state, n)
            if has_left(state, rank):
                continue
            place = (slot * ranks + rank) * channels + CHANNEL_ACK
            acked = ld64(ld64(state + P.ARRIVED) + place * 8)
            if acked < ld64(record + P.SLOT_EPOCH) - 1:
                return True
    return False


@inner
def look_around(state, now):
    """A rank that waits and hears nothing writes to all, so that the NIC finds who is gone."""
    op = other_op(state, P.OP_PING)
    done = _check(state, op, PHASE_OF_RECEIVING)
    if now - ld64(state + P.LAST_LOOK) < ld64(state + P.PING_NS):
        return
    silent = ld64(state + P.SEEN) == ld64(state + P.LAST_SEEN)
    st64(state + P.LAST_LOOK, now)
    st64(state + P.LAST_SEEN, ld64(state + P.SEEN))
    has_room = room(ld64(state + P.ENGINE)) >= ld64(state + P.NUM_REMOTES)
    if silent and done and has_room and _waits(state):
        add(state + P.PINGS, 1)
        tell_all(state, op, PING)
