"""What the engine's loop runs while it is measured."""

from __future__ import annotations

from typing import Final

from moecomm.transport.engine import program as P
from moecomm.transport.engine.jit import hook
from moecomm.transport.engine.native import c_function, ld64, ld64_acquire, st64, st64_release

ENGINE: Final = 0
OP: Final = 8
LOCAL: Final = 16
LOCAL_KEY: Final = 24
NBYTES: Final = 32
LEFT: Final = 40
WINDOW: Final = 48
START: Final = 56
END: Final = 64
FIRST: Final = 72
TURN: Final = 80  # 1: this rank sends next; turns before a burst
TARGETS: Final = 88  # number of targets below
TARGET: Final = 128  # peer, remote address, remote key of each
TARGET_BYTES: Final = 24
STATE_BYTES: Final = TARGET + 64 * TARGET_BYTES
IMM: Final = 4242

# What RING needs, from its own address.
MOVE: Final = 0  # the mover's program, and its state
MOVER: Final = 8
RING_ENGINE: Final = 16
RING_AT: Final = 24  # the moment by the clock; 0: not now
RUNG: Final = 32  # when it was
HERE: Final = 40  # when everything had come
EPOCH: Final = 48
DOORS: Final = 56  # address of the first door, and how many follow each other
NUM_DOORS: Final = 64
NUM_WORDS: Final = 72  # of those below: addresses that hold the epoch once all is here
WORDS: Final = 128
RING_BYTES: Final = WORDS + 8 * 3 * 64  # three doors of each peer

_c_program = c_function("i64", "i64")


@hook("int64(int64)")
def STREAM(state):
    """``LEFT`` writes to the first target, ``WINDOW`` of them in flight."""
    engine, op, left = ld64(state + ENGINE), ld64(state + OP), ld64(state + LEFT)
    if ld64(state + END) != 0:
        return 0
    if ld64(state + START) == 0:
        st64(state + START, P.clock_ns(engine))
        P.begin(engine, op, 0)
    under_way = P.pending(engine, op)
    if left == 0:
        if under_way == 0:
            st64(state + END, P.clock_ns(engine))
        return 1
    count = min(min(left, ld64(state + WINDOW) - under_way), P.room(engine))
    if count > 0:
        P.extend(engine, op, count)
    for _ in range(count):
        P.write(
            engine, op, 0, ld64(state + TARGET), ld64(state + LOCAL), ld64(state + LOCAL_KEY),
            ld64(state + NBYTES), ld64(state + TARGET + 8), ld64(state + TARGET + 16), -1,
        )  # fmt: skip
    st64(state + LEFT, left - count)
    return count


@hook("int64(int64)")
def PINGPONG(state):
    """``LEFT`` round trips of a write with an immediate."""
    engine, op = ld64(state + ENGINE), ld64(state + OP)
    if ld64(state + END) != 0:
        return 0
    if ld64(state + START) == 0:
        st64(state + START, P.clock_ns(engine))
        P.begin(engine, op, 0)
    if ld64(state + TURN) == 0:
        if not P.take(engine, IMM, 1):
            return 0
        left = ld64(state + LEFT) - 1
        st64(state + LEFT, left)
        if left == 0:
            st64(state + END, P.clock_ns(engine))
            if ld64(state + FIRST) != 0:
                return 1
    st64(state + TURN, 0)
    P.extend(engine, op, 1)
    P.write(
        engine, op, 0, ld64(state + TARGET), ld64(state + LOCAL), ld64(state + LOCAL_KEY),
        ld64(state + NBYTES), ld64(state + TARGET + 8), ld64(state + TARGET + 16), IMM,
    )  # fmt: skip
    return 1


@hook("int64(int64)")
def BURST(state):
    """One write to each target, after ``TURN`` turns; ``START`` is before the first is queued."""
    engine, op = ld64(state + ENGINE), ld64(state + OP)
    if ld64(state + END) != 0:
        return 0
    if ld64(state + START) != 0:
        if P.is_done(engine, op):
            st64(state + END, P.clock_ns(engine))
        return 1
    turns = ld64(state + TURN)
    if turns > 0:
        st64(state + TURN, turns - 1)
        return 0
    st64(state + START, P.clock_ns(engine))
    count = ld64(state + TARGETS)
    P.begin(engine, op, count)
    for n in range(count):
        target = state + TARGET + n * TARGET_BYTES
        P.write(
            engine, op, 0, ld64(target), ld64(state + LOCAL), ld64(state + LOCAL_KEY),
            ld64(state + NBYTES), ld64(target + 8), ld64(target + 16), -1,
        )  # fmt: skip
    return count


@hook("int64(int64)")
def RING(state):
    """A mover's turn, and what kernels do: ring doors at a moment, and see when all has come."""
    engine, at, did = ld64(state + RING_ENGINE), ld64_acquire(state + RING_AT), 0
    if at != 0 and ld64(state + RUNG) == 0 and P.clock_ns(engine) >= at:
        st64(state + RUNG, P.clock_ns(engine))
        for n in range(ld64(state + NUM_DOORS)):
            st64_release(ld64(state + DOORS) + n * 8, ld64(state + EPOCH))
        did = 1
    did += _c_program(ld64(state + MOVE), ld64(state + MOVER))
    if ld64(state + RUNG) == 0 or ld64(state + HERE) != 0:
        return did
    for n in range(ld64(state + NUM_WORDS)):
        if ld64(ld64(state + WORDS + n * 8)) < ld64(state + EPOCH):
            return did
    st64_release(state + HERE, P.clock_ns(engine))
    return did
