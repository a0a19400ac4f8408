"""What a *program* calls: a ``jit.hook("int64(int64)")`` that the loop runs once per turn.

A program gets the address of its own state, in which its author has put the engine's
(``TransferEngine.state``). It runs on the loop's thread, between polls: it must not wait. What it
returns: 0, nothing to do; above 0, it did something (the loop does not rest); below 0, it has
failed, and the engine ends with this number. When something else ends the engine, the program is
called a last time, and finds ``fault``.

Operations come from ``TransferEngine.program_operations``; one may be used again once it is done.
"""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import counter_of
from moecomm.transport.engine.jit import flat, inner
from moecomm.transport.engine.lines import channel_at
from moecomm.transport.engine.native import (
    c_function,
    ld32,
    ld64,
    st8,
    st16,
    st32,
    st64,
    st64_release,
)
from moecomm.transport.engine.posting import (
    add_to_batch,
    has_places,
    has_room,
    next_place,
    use_credit,
)

__all__ = [
    "aborted_by", "arrivals", "begin", "clock_ns", "error_of", "extend", "fault", "has_failed",
    "is_done", "next_arrival", "now_ns", "pending", "room", "take", "write",
]  # fmt: skip

_c_clock = c_function("i32", "i32", "i64")


@inner
def room(engine):
    """How many writes the program's ring takes now."""
    taken = ld64(engine + S.PROGRAM_TAIL) - ld64(engine + S.PROGRAM_HEAD)
    return ld64(engine + S.RING_SIZE) - taken


@flat
def begin(engine, op, count):
    """Start an operation of ``count`` writes, which follow."""
    record = ld64(engine + S.OPERATIONS) + op * S.OP_BYTES
    st64(record + S.OP_CODE, 0)
    st64_release(record + S.OP_PENDING, count)


@flat
def extend(engine, op, count):
    """Add ``count`` writes, which follow, to an operation that was begun."""
    record = ld64(engine + S.OPERATIONS) + op * S.OP_BYTES
    st64_release(record + S.OP_PENDING, ld64(record + S.OP_PENDING) + count)


@flat
def pending(engine, op):
    """How many of the operation's writes are not done."""
    return ld64(ld64(engine + S.OPERATIONS) + op * S.OP_BYTES + S.OP_PENDING)


@flat
def write(engine, op, nic, peer, local, local_key, nbytes, remote, remote_key, imm):
    """Queue a write; ``imm`` below 0: without an immediate. There is ``room`` for it.

    What may be posted with the next batch goes there at once: a command in the ring takes 80
    instructions more until it is there, too.
    """
    index = nic * ld64(engine + S.NUM_PEERS) + peer
    channel = channel_at(engine, index)
    record = ld64(channel + S.CH_NIC)
    at_once = _is_next(engine, channel) and has_room(record, channel)
    if at_once and imm >= 0:
        at_once = use_credit(engine, record, channel, index)
    tail = ld64(engine + S.PROGRAM_TAIL)
    place = tail & (ld64(engine + S.RING_SIZE) - 1)
    post = ld64(engine + S.PROGRAM_RING) + place * R.POST_BYTES
    if at_once:
        post = next_place(record)
    st32(post + R.POST_PEER, peer)
    st16(post + R.POST_NIC, nic)
    st8(post + R.POST_KIND, R.WRITE)
    st8(post + R.POST_FLAGS, R.HAS_IMM if imm >= 0 else 0)
    st32(post + R.POST_IMM, imm)
    st32(post + R.POST_CONTEXT, op)
    st64(post + R.POST_LOCAL, local)
    st64(post + R.POST_LOCAL_KEY, local_key)
    st64(post + R.POST_NBYTES, nbytes)
    st64(post + R.POST_REMOTE, remote)
    st64(post + R.POST_REMOTE_KEY, remote_key)
    if at_once:
        add_to_batch(engine, record, channel, index, post, op, S.SLOT_USER)
    else:
        st64(engine + S.PROGRAM_TAIL, tail + 1)


@flat
def _is_next(engine, channel):
    """Whether nothing comes before a command to this channel, and nothing is amiss with it."""
    return (
        ld64(channel + S.CH_FIRST) | ld64(channel + S.CH_SLOW) | ld64(channel + S.CH_CODE) == 0
        and ld64(engine + S.PROGRAM_TAIL) == ld64(engine + S.PROGRAM_HEAD)
        and has_places(engine)
    )


@inner
def is_done(engine, op):
    """Whether all writes of the operation are done, well or not: sources may change."""
    return pending(engine, op) == 0


@inner
def error_of(engine, op):
    """Error number of the operation's first failure; 0: none so far."""
    return ld64(ld64(engine + S.OPERATIONS) + op * S.OP_BYTES + S.OP_CODE)


@inner
def arrivals(engine, imm):
    """How often ``imm`` has come beyond what was taken; -1: there is no memory for its counter."""
    counter = counter_of(engine, imm)
    if counter == 0:
        return -1
    return ld64(counter + S.IMM_ARRIVED) - ld64(counter + S.IMM_USED)


@flat
def take(engine, imm, count):
    """Use up ``count`` arrivals of ``imm`` if so many have come; whether they have."""
    counter = counter_of(engine, imm)
    if counter == 0:
        return False
    used = ld64(counter + S.IMM_USED)
    if ld64(counter + S.IMM_ARRIVED) - used < count:
        return False
    st64(counter + S.IMM_USED, used + count)
    return True


@inner
def aborted_by(engine):
    """The peer that has given up, or -1."""
    return ld64(engine + S.ABORTED_BY) - 1


@inner
def now_ns(engine):
    """The monotonic clock, at most a few turns old."""
    return ld64(engine + S.NOW)


@inner
def clock_ns(engine):
    """The monotonic clock now: some tens of nanoseconds."""
    spec = ld64(engine + S.TIMESPEC)
    _c_clock(ld64(engine + S.CLOCK_GETTIME), 1, spec)  # CLOCK_MONOTONIC
    return ld64(spec) * 1_000_000_000 + ld64(spec + 8)


@flat
def next_arrival(engine):
    """The next immediate that has come; -1: there is none now. Only with ``takes_arrivals``."""
    head = ld64(engine + S.INBOX_HEAD)
    if head == ld64(engine + S.INBOX_TAIL):
        return -1
    st64(engine + S.INBOX_HEAD, head + 1)
    place = head & (ld64(engine + S.INBOX_SIZE) - 1)
    return ld32(ld64(engine + S.INBOX) + place * 4)


@inner
def fault(engine):
    """What has ended the engine; 0: it runs."""
    return ld64(engine + S.FAULT)


@inner
def has_failed(engine, peer):
    """Error number of what ended the way to a peer, by any NIC; 0: all are open."""
    peers = ld64(engine + S.NUM_PEERS)
    for nic in range(ld64(engine + S.NUM_NICS)):
        code = ld64(channel_at(engine, nic * peers + peer) + S.CH_CODE)
        if code != 0:
            return code
    return 0
