"""What ``speed.py`` times: round trips by the engine, and by a provider's hooks alone. Both note
the processor's clock at each post, as perftest does. In a module of its own, so that what is
compiled outside of the machine is found in there."""

from __future__ import annotations

from typing import Final

from moecomm.bench import transfer_programs as programs
from moecomm.transport.engine import jit
from moecomm.transport.engine import program as P
from moecomm.transport.engine.native import c_function, cycles, ld32, ld64, st64
from moecomm.transport.engine.records import ARRIVED, EVENT_BYTES, SENT

# A word more of the state of ``transfer_programs``: where the next time goes, 8 bytes.
STAMP: Final = 96

_c_hook = c_function("i64", "i64", "i64", "i64")


@jit.hook("int64(int64)")
def PINGPONG(state):  # type: ignore[no-untyped-def]
    """``LEFT`` round trips of a write with an immediate, each post of which is timed."""
    engine, op = ld64(state + programs.ENGINE), ld64(state + programs.OP)
    if ld64(state + programs.END) != 0:
        return 0
    if ld64(state + programs.START) == 0:
        st64(state + programs.START, 1)
        P.begin(engine, op, 0)
    if ld64(state + programs.TURN) == 0:
        if not P.take(engine, programs.IMM, 1):
            return 0
        left = ld64(state + programs.LEFT) - 1
        st64(state + programs.LEFT, left)
        if left == 0:
            st64(state + programs.END, 1)
            if ld64(state + programs.FIRST) != 0:
                return 1
    st64(state + programs.TURN, 0)
    stamp = ld64(state + STAMP)
    st64(stamp, cycles())
    st64(state + STAMP, stamp + 8)
    P.extend(engine, op, 1)
    P.write(
        engine, op, 0, ld64(state + programs.TARGET), ld64(state + programs.LOCAL),
        ld64(state + programs.LOCAL_KEY), ld64(state + programs.NBYTES),
        ld64(state + programs.TARGET + 8), ld64(state + programs.TARGET + 16), programs.IMM,
    )  # fmt: skip
    return 1


@jit.inner
def _count(events, got, kind):  # type: ignore[no-untyped-def]
    found = 0
    for n in range(got):
        if ld32(events + n * EVENT_BYTES) == kind:
            found += 1
    return found


@jit.hot("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def by_hooks(post, poll, state, record, events, hops, first, stamps):  # type: ignore[no-untyped-def]
    """``hops`` round trips by the hooks alone; 0, or a negative error number."""
    sent = 1
    for n in range(hops + 1 - first):
        if first != 0 or n > 0:
            while sent == 0:
                sent += _count(events, _c_hook(poll, state, events, 8), SENT)
            sent = 0
            st64(stamps, cycles())
            stamps += 8
            if _c_hook(post, state, record, 1) != 1:
                return -1
            if n == hops:
                break
        came = 0
        while came == 0:
            got = _c_hook(poll, state, events, 8)
            if got < 0:
                return got
            came = _count(events, got, ARRIVED)
            sent += _count(events, got, SENT)
    return 0


@jit.hot("int64()")
def clock():  # type: ignore[no-untyped-def]
    """The clock that posts are timed by."""
    return cycles()
