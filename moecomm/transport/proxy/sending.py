"""What goes: from doors to writes. A slot goes from door to door, each slot by itself."""

from __future__ import annotations

from moecomm.remote_words import Plan
from moecomm.transport.engine.jit import inner
from moecomm.transport.engine.native import ld64, ld64_acquire, st64
from moecomm.transport.engine.program import begin, clock_ns, room, write
from moecomm.transport.proxy import state as P
from moecomm.transport.proxy.words import (
    ACK,
    HEAD,
    PRIVATE,
    RECORDS,
    ROWS,
    add,
    has_left,
    immediate_of,
    op_of,
    pair_at,
    plan_at,
    remote_rank,
    slot_at,
)

_FIRST, _COUNT = int(Plan.RECORD_FIRST) * 8, int(Plan.RECORD_COUNT) * 8
_ROW_FIRST, _ROW_COUNT, _ROW_BASE = (
    int(Plan.ROW_FIRST) * 8,
    int(Plan.ROW_COUNT) * 8,
    int(Plan.ROW_BASE) * 8,
)


@inner
def nic_for(state, rank, kind):
    """In turn over peers and kinds; NIC i of one rank talks to NIC i of another."""
    return (ld64(state + P.RANK) + rank + kind) % ld64(state + P.NUM_NICS)


@inner
def post(state, op, kind, rank, source, target, nbytes, imm):
    """One write of ``bulk``, from and to offsets; of nothing, where there are no bytes."""
    engine, nic = ld64(state + P.ENGINE), nic_for(state, rank, kind)
    peer = ld64(state + P.PEERS) + (rank * ld64(state + P.NUM_NICS) + nic) * P.PEER_BYTES
    if nbytes > 0:
        local, local_key = (
            ld64(state + P.BULK) + source,
            ld64(ld64(state + P.NIC_KEYS) + nic * 8),
        )
        remote, remote_key = ld64(peer + P.PEER_BULK) + target, ld64(peer + P.PEER_BULK_KEY)
    else:
        local, local_key = ld64(peer + P.PEER_SOURCE), ld64(peer + P.PEER_SOURCE_KEY)
        remote, remote_key = ld64(peer + P.PEER_NOTHING), ld64(peer + P.PEER_NOTHING_KEY)
    write(engine, op, nic, rank, local, local_key, nbytes, remote, remote_key, imm)
    add(state + P.WRITES + kind * 8, 1)
    add(state + P.NBYTES + kind * 8, nbytes)


@inner
def _amount(state, kind, slot, rank):
    """How many records a write of this kind carries to ``rank``; -1: there is no write."""
    if has_left(state, rank):
        return -1
    count, private = ld64(pair_at(state, slot, rank) + P.PAIR_COUNT), ld64(state + P.PRIVATE)
    if kind == PRIVATE:
        return min(count, private) if count > 0 else -1
    if kind == RECORDS:
        return count - private if count > private else -1
    return 0


@inner
def _post_one(state, op, kind, slot, epoch, rank, amount):
    me = ld64(state + P.RANK)
    pairs = slot * ld64(state + P.NUM_RANKS)
    source = target = nbytes = 0
    if kind == HEAD:
        nbytes = ld64(state + P.HEAD_BYTES)
        source = ld64(state + P.OUT_HEAD) + (pairs + rank) * nbytes
        target = ld64(state + P.IN_HEAD) + (pairs + me) * nbytes
    elif kind in (PRIVATE, RECORDS):
        size = ld64(state + P.RECORD_BYTES)
        skip = 0 if kind == PRIVATE else ld64(state + P.PRIVATE)
        first = ld64(pair_at(state, slot, rank) + P.PAIR_FIRST)
        out = slot * ld64(state + P.STAGED_RECORDS) + first + skip
        into = (pairs + me) * ld64(state + P.SOURCE_RECORDS) + skip
        nbytes = amount * size
        source = ld64(state + P.OUT_RECORD) + out * size
        target = ld64(state + P.IN_RECORD) + into * size
    elif kind == ROWS:
        plan, size = plan_at(state, slot, rank), ld64(state + P.ROW_BYTES)
        out = slot * ld64(state + P.STAGED_ROWS) + ld64(plan + _ROW_FIRST)
        into = slot * ld64(state + P.LANDING_ROWS) + ld64(plan + _ROW_BASE)
        nbytes = ld64(plan + _ROW_COUNT) * size
        source = ld64(state + P.OUT_ROW) + out * size
        target = ld64(state + P.IN_ROW) + into * size
    post(state, op, kind, rank, source, target, nbytes, immediate_of(state, kind, slot, epoch))


@inner
def _post_all(state, op, kind, slot, epoch):
    """The writes of one door, to every remote peer that gets one."""
    count = 0
    for n in range(ld64(state + P.NUM_REMOTES)):
        if _amount(state, kind, slot, remote_rank(state, n)) >= 0:
            count += 1
    begin(ld64(state + P.ENGINE), op, count)
    for n in range(ld64(state + P.NUM_REMOTES)):
        rank = remote_rank(state, n)
        amount = _amount(state, kind, slot, rank)
        if amount >= 0:
            _post_one(state, op, kind, slot, epoch, rank, amount)
    return count


@inner
def _keep_plan(state, slot):
    """At door HEAD, before any head goes: a peer that gets no records may acknowledge before door
    PRIVATE has been looked at, and then the next epoch's plan may be there."""
    for n in range(ld64(state + P.NUM_REMOTES)):
        rank = remote_rank(state, n)
        plan, pair = plan_at(state, slot, rank), pair_at(state, slot, rank)
        st64(pair + P.PAIR_FIRST, ld64(plan + _FIRST))
        st64(pair + P.PAIR_COUNT, ld64(plan + _COUNT))


@inner
def _rung(state, slot, door, epoch):
    word = ld64(state + P.DOOR) + slot * ld64(state + P.DOOR_BYTES) + door * 8
    return ld64_acquire(word) >= epoch


@inner
def next_door(state, slot):
    """The door that has been rung and not been served; -1: none."""
    record = slot_at(state, slot)
    stage, epoch = ld64(record + P.SLOT_STAGE), ld64(record + P.SLOT_EPOCH)
    if stage < P.RETURN:
        return stage if _rung(state, slot, stage, epoch) else -1
    # Never both of one epoch, and none of the next before this one's has reached the peers.
    if _rung(state, slot, ROWS, epoch):
        return ROWS
    return ACK if _rung(state, slot, ACK, epoch) else -1


@inner
def serve(state, slot):
    """Go through the doors of one slot as far as they have been rung; how many writes."""
    engine, record = ld64(state + P.ENGINE), slot_at(state, slot)
    posted = 0
    door = next_door(state, slot)
    while door >= 0:
        opened = ld64(record + P.SLOT_OPEN)
        # The operation of the epoch before may not have been reported yet.
        if (opened >> door) & 1 or room(engine) < ld64(state + P.NUM_REMOTES):
            break
        if door == HEAD:
            _keep_plan(state, slot)
        posted += 1 + _post_all(
            state, op_of(state, slot, door), door, slot, ld64(record + P.SLOT_EPOCH)
        )
        st64(record + P.SLOT_OPEN, opened | (1 << door))
        st64(record + P.SLOT_POSTED + door * 8, clock_ns(engine))
        if door >= P.RETURN:
            st64(record + P.SLOT_STAGE, 0)
            st64(record + P.SLOT_EPOCH, ld64(record + P.SLOT_EPOCH) + 1)
        else:
            st64(record + P.SLOT_STAGE, door + 1)
        door = next_door(state, slot)
    return posted
