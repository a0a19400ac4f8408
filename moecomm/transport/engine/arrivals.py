"""Counting immediates and finishing operations, for the loop and for programs.

A counter is found by two loads: 2^20 leaves of 2^12 counters, of which only those in use exist. It
counts arrivals for ever; what expectations have used up is counted beside it. Arrivals before an
expectation therefore count, and nothing is reset.
"""

from __future__ import annotations

from moecomm.transport.engine import state as S
from moecomm.transport.engine.jit import flat, inner
from moecomm.transport.engine.native import (
    c_function,
    fence,
    ld64,
    st32,
    st64,
    st64_release,
    unlikely,
)

_c_calloc = c_function("i64", "i64", "i64")


@inner
def publish(address, value):
    """Store a flag after everything stored before; also to write-combining memory."""
    st64_release(address, value)
    fence()


@flat
def counter_of(engine, imm):
    """Address of the counter of ``imm``; 0 when there is no memory left."""
    entry = ld64(engine + S.IMM_DIRECTORY) + (imm >> S.IMM_LEAF_BITS) * 8
    leaf = ld64(entry)
    if unlikely(leaf == 0):
        leaf = _c_calloc(ld64(engine + S.CALLOC), 1 << S.IMM_LEAF_BITS, S.IMM_BYTES)
        if leaf == 0:
            return 0
        st64_release(entry, leaf)
    return leaf + (imm & ((1 << S.IMM_LEAF_BITS) - 1)) * S.IMM_BYTES


@inner
def finish(engine, op):
    """The operation is done: publish its flag if it went well, and report it."""
    record = ld64(engine + S.OPERATIONS) + op * S.OP_BYTES
    address = ld64(record + S.OP_FLAG)
    if address != 0 and ld64(record + S.OP_CODE) == 0:
        publish(address, ld64(record + S.OP_VALUE))
    if ld64(record + S.OP_REPORT) != 0:
        tail = ld64(engine + S.DONE_TAIL)
        place = tail & (ld64(engine + S.DONE_SIZE) - 1)
        st32(ld64(engine + S.DONE) + place * 4, op)
        st64_release(engine + S.DONE_TAIL, tail + 1)


@flat
def piece_done(engine, op, code, detail, channel):
    """One post of the operation is done; ``code`` 0 when it went well."""
    record = ld64(engine + S.OPERATIONS) + op * S.OP_BYTES
    if unlikely(code != 0) and ld64(record + S.OP_CODE) == 0:
        peers = ld64(engine + S.NUM_PEERS)
        st64(record + S.OP_DETAIL, detail)
        st64(record + S.OP_NIC, channel // peers)
        st64(record + S.OP_PEER, channel % peers)
        st64(record + S.OP_CODE, code)
    left = ld64(record + S.OP_PENDING) - 1
    st64_release(record + S.OP_PENDING, left)
    if left == 0:
        finish(engine, op)


@flat
def settle(engine, counter):
    """Finish the operation that waits for this counter, if enough has come."""
    wanted = ld64(counter + S.IMM_WANTED)
    used = ld64(counter + S.IMM_USED)
    if wanted > 0 and ld64(counter + S.IMM_ARRIVED) - used >= wanted:
        st64(counter + S.IMM_USED, used + wanted)
        st64(counter + S.IMM_WANTED, 0)
        piece_done(engine, ld64(counter + S.IMM_OP), 0, 0, 0)


@flat
def arrive(engine, imm):
    """Count one arrival; whether there was memory for its counter."""
    counter = counter_of(engine, imm)
    if counter == 0:
        return False
    st64_release(counter + S.IMM_ARRIVED, ld64(counter + S.IMM_ARRIVED) + 1)
    settle(engine, counter)
    return True


@inner
def expect(engine, imm, count, op):
    """Finish ``op`` once ``imm`` has come ``count`` times; whether there was memory."""
    counter = counter_of(engine, imm)
    if counter == 0:
        return False
    st64(counter + S.IMM_OP, op)
    st64(counter + S.IMM_WANTED, count)
    settle(engine, counter)
    return True


@inner
def forget(engine, imm, op):
    """Stop waiting for ``imm`` on behalf of ``op``, unless it is done; nothing is used up."""
    counter = counter_of(engine, imm)
    if counter != 0 and ld64(counter + S.IMM_WANTED) > 0 and ld64(counter + S.IMM_OP) == op:
        st64(counter + S.IMM_WANTED, 0)
        piece_done(engine, op, S.FORGOTTEN, 0, 0)
