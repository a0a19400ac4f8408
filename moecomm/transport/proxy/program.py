"""What the mover does in each turn of the engine's loop; see ``docs/protocol.md``.

Nothing here waits: whatever cannot go on now is looked at again in the next turn.
"""

from __future__ import annotations

from moecomm.transport.engine.jit import hook, inner
from moecomm.transport.engine.native import ld64, ld64_acquire, st64, st64_release
from moecomm.transport.engine.program import fault, is_done, now_ns, room
from moecomm.transport.proxy import state as P
from moecomm.transport.proxy.arriving import take_arrivals
from moecomm.transport.proxy.failing import (
    PHASE_OF_RECEIVING,
    blame,
    check_slot,
    given_up,
    look_around,
    tell_all,
)
from moecomm.transport.proxy.landing import tell_streams, wake_streams
from moecomm.transport.proxy.sending import next_door, serve
from moecomm.transport.proxy.words import LEAVE, other_op, slot_at


@inner
def _leave(state):
    """Everything that was rung has gone; then say good-bye, and once that has gone: closed."""
    engine, op = ld64(state + P.ENGINE), other_op(state, P.OP_LEAVE)
    if ld64(state + P.CLOSING) == 2:
        if is_done(engine, op):
            st64_release(state + P.CLOSED, 1)
        return
    over = ld64(state + P.TOLD) != 0
    if over and not is_done(engine, other_op(state, P.OP_ABORT)):
        return
    for slot in range(ld64(state + P.NUM_SLOTS)):
        if not over and (
            ld64(slot_at(state, slot) + P.SLOT_OPEN) != 0 or next_door(state, slot) >= 0
        ):
            return
    if room(engine) >= ld64(state + P.NUM_REMOTES):
        tell_all(state, op, LEAVE)
        st64(state + P.CLOSING, 2)


@hook("int64(int64)")
def MOVE(state):
    """A turn; how much was done."""
    engine = ld64(state + P.ENGINE)
    if fault(engine) != 0:
        if ld64(state + P.CULPRIT) == 0:
            blame(state, PHASE_OF_RECEIVING, ld64(state + P.RANK), fault(engine))
        wake_streams(state)
        return 0
    done = take_arrivals(state)
    for slot in range(ld64(state + P.NUM_SLOTS)):
        check_slot(state, slot)
    over = given_up(state)
    if over or ld64_acquire(state + P.WAKE) != 0:
        wake_streams(state)
    if not over:
        for slot in range(ld64(state + P.NUM_SLOTS)):
            done += serve(state, slot)
            tell_streams(state, slot, now_ns(engine))
        look_around(state, now_ns(engine))
    if ld64_acquire(state + P.CLOSING) != 0 and ld64(state + P.CLOSED) == 0:
        _leave(state)
    return done
