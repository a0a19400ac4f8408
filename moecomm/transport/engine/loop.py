"""The hot loop: one function that a worker thread runs without the GIL until it is told to stop.

One turn: the program, whose writes are posted at once; credit writes, lines of waiting commands,
new commands; then *every* NIC is polled. The order matters in one way: nothing waits for a queue to
drain, because a peer's set-up or its queue may depend on any of this rank's NICs being polled (the
first write to a peer gives EAGAIN until both sides have polled).
"""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import expect, forget, piece_done
from moecomm.transport.engine.credits import grant, serve_credits
from moecomm.transport.engine.ends import end_channel, lose_posts
from moecomm.transport.engine.events import end_engine, poll
from moecomm.transport.engine.jit import cold, flat, hot
from moecomm.transport.engine.lines import (
    channel_at,
    is_closed_to,
    nic_at,
    stand_last,
)
from moecomm.transport.engine.native import (
    c_function,
    ld8,
    ld16,
    ld32,
    ld64,
    ld64_acquire,
    st64,
    st64_release,
    unlikely,
)
from moecomm.transport.engine.posting import (
    admit,
    flush,
    has_places,
    make_room,
    serve_lines,
    withdraw,
)
from moecomm.transport.engine.program import clock_ns

_TICK_NS = 1_000_000
# What is longer between two looks at the clock is not a peer's fault: this thread did not run. It
# still counts as this much, or as a quarter of the time limit: on a processor with ten busy
# processes every look is that late, and a silent peer would be given up by none of them.
_STALL_NS = 500_000_000
_CHANNELS_PER_TURN = 16
_COMMANDS_PER_TURN = 64
_PAUSE_US = 50
# Idle turns between looks at the clock; one that works counts as several, one that yields as more
# (it takes 10 ms where others want the processor), a sleep as all. A look takes 20 ns where the
# clock is the TSC, and 2 us in the tests' virtual machine.
_LOOK_AFTER = 256
_LONG_TURN = 4
_YIELDED = 32

_c_program = c_function("i64", "i64")
_c_yield = c_function("i32")
_c_usleep = c_function("i32", "u32")


# ---- Commands -----------------------------------------------------------------------------------


@flat
def _obey(engine, command):
    kind, op = ld8(command + R.POST_KIND), ld32(command + R.POST_CONTEXT)
    if kind == S.EXPECT:
        count = ld64(command + R.POST_NBYTES)
        if not expect(engine, ld32(command + R.POST_IMM), count, op):
            end_engine(engine, S.NO_MEMORY, 0, ld64(engine + S.NICS))
        return
    if kind == S.FORGET:
        forget(engine, ld32(command + R.POST_IMM), op)
        return
    index = ld16(command + R.POST_NIC) * ld64(engine + S.NUM_PEERS) + ld32(command + R.POST_PEER)
    channel = channel_at(engine, index)
    nic = ld64(channel + S.CH_NIC)
    make_room(engine, nic)
    if ld64(channel + S.CH_FIRST) == 0 and admit(engine, nic, channel, index, command):
        return
    if is_closed_to(channel, command):
        piece_done(engine, op, S.PEER_FAILED, ld64(channel + S.CH_CODE), index)
    else:
        stand_last(engine, index, command)


@cold
def _take(engine, ring, head_at, count):
    """Obey up to ``count`` commands of one ring."""
    mask = ld64(engine + S.RING_SIZE) - 1
    head = ld64(engine + head_at)
    taken = 0
    while taken < count and has_places(engine):
        _obey(engine, ring + ((head + taken) & mask) * R.POST_BYTES)
        taken += 1
    st64_release(engine + head_at, head + taken)
    if taken > 0:
        st64(engine + S.IDLE, S.BUSY)


@flat
def _drain(engine, ring, head_at, tail):
    """Obey commands of one ring."""
    count = tail - ld64(engine + head_at)
    if unlikely(count > 0):
        _take(engine, ring, head_at, min(count, _COMMANDS_PER_TURN))


@flat
def _drain_program(engine):
    """The same for the ring whose producer is this thread. An empty one starts over: its first
    entries are still in the cache, and of 4096 the next ones are not."""
    tail = ld64(engine + S.PROGRAM_TAIL)
    if unlikely(tail != 0):
        _drain(engine, ld64(engine + S.PROGRAM_RING), S.PROGRAM_HEAD, tail)
        if ld64(engine + S.PROGRAM_HEAD) == tail:
            st64(engine + S.PROGRAM_HEAD, 0)
            st64(engine + S.PROGRAM_TAIL, 0)


# ---- Clock --------------------------------------------------------------------------------------


@cold
def _look_for_aborts(engine):
    if ld64(engine + S.ABORTED_BY) != 0:
        return
    for peer in range(ld64(engine + S.NUM_PEERS)):
        code = ld64_acquire(ld64(engine + S.ABORT_WORDS) + peer * S.ROW_BYTES + S.ROW_ABORT)
        if code != 0:
            st64(engine + S.ABORT_CODE, code)
            st64_release(engine + S.ABORTED_BY, peer + 1)
            return


@cold
def _look_for_silence(engine, now, stalled):
    """End channels on which nothing has moved for too long."""
    limit = ld64(engine + S.TIMEOUT_NS)
    for index in range(ld64(engine + S.NUM_NICS) * ld64(engine + S.NUM_PEERS)):
        channel = channel_at(engine, index)
        if ld64(channel + S.CH_IN_FLIGHT) == 0 and ld64(channel + S.CH_FIRST) == 0:
            continue
        since = ld64(channel + S.CH_SINCE) + stalled
        st64(channel + S.CH_SINCE, since)
        if now - since > limit:
            withdraw(engine, index)
            end_channel(engine, index, S.TIMED_OUT, 0)
            lose_posts(engine, index, S.TIMED_OUT)


@cold
def _tick(engine, now):
    before = ld64(engine + S.NOW)
    st64(engine + S.NOW, now)
    gap = now - ld64(engine + S.LAST_TICK)
    if gap < _TICK_NS:
        return
    st64(engine + S.LAST_TICK, now)
    most = min(_STALL_NS, ld64(engine + S.TIMEOUT_NS) >> 2)
    _look_for_silence(engine, now, max(now - before - most, 0))
    _look_for_aborts(engine)
    _grant_all(engine)


@cold
def _grant_all(engine):
    for nic in range(ld64(engine + S.NUM_NICS)):
        grant(engine, nic_at(engine, nic))


@flat
def _rest(engine):
    """After a turn: a new one if anything happened; else spin, then give up the processor, then
    sleep. What that counts towards the next look at the clock."""
    idle = ld64(engine + S.IDLE) + 1
    st64(engine + S.IDLE, idle)
    if idle == 0:
        return _LONG_TURN
    if unlikely(idle & 15 == 0):
        _grant_all(engine)
    if idle <= ld64(engine + S.SPIN_TURNS):
        return 1  # no pause instruction: it takes longer than all the rest of an idle turn
    return _let_others(engine, idle - ld64(engine + S.SPIN_TURNS))


@cold
def _let_others(engine, idle):
    if idle <= ld64(engine + S.YIELD_TURNS):
        _c_yield(ld64(engine + S.SCHED_YIELD))
        return _YIELDED
    _c_usleep(ld64(engine + S.USLEEP), ld64(engine + S.SLEEP_US))
    return _LOOK_AFTER


@flat
def _flush_all(engine):
    nic, end = ld64(engine + S.NICS), ld64(engine + S.NICS_END)
    while nic < end:
        flush(engine, nic)
        nic += S.NIC_BYTES


@flat
def _turn(engine):
    """Everything once."""
    program = ld64(engine + S.PROGRAM)
    if program != 0:
        did = _c_program(program, ld64(engine + S.PROGRAM_STATE))
        if did > 0:
            st64(engine + S.IDLE, S.BUSY)
            _flush_all(engine)  # before all other looks, which take 40 instructions
        elif unlikely(did < 0):
            end_engine(engine, S.PROGRAM_FAILED, -did, ld64(engine + S.NICS))
    serve_credits(engine)
    serve_lines(engine, _CHANNELS_PER_TURN)
    _drain_program(engine)
    _drain(engine, ld64(engine + S.RING), S.HEAD, ld64_acquire(engine + S.TAIL))
    _flush_all(engine)
    nic, end = ld64(engine + S.NICS), ld64(engine + S.NICS_END)
    while nic < end:
        poll(engine, nic)
        nic += S.NIC_BYTES


@cold
def _obeys(engine):
    """Stand still while Python wants that; whether the loop goes on then."""
    while ld64_acquire(engine + S.COMMAND) == S.PAUSE:
        st64_release(engine + S.PHASE, S.PAUSED)
        _c_usleep(ld64(engine + S.USLEEP), _PAUSE_US)
    st64_release(engine + S.PHASE, S.RUNNING)
    return ld64_acquire(engine + S.COMMAND) != S.STOP


@hot("int64(int64)")
def run(engine):
    """Run until ``COMMAND`` is ``STOP`` or something ends the engine; what did (``FAULT``)."""
    st64(engine + S.NOW, clock_ns(engine))
    st64_release(engine + S.PHASE, S.RUNNING)
    look_in = _LOOK_AFTER
    while ld64(engine + S.FAULT) == 0:
        if unlikely(ld64_acquire(engine + S.COMMAND) != S.RUN) and not _obeys(engine):
            break
        st64(engine + S.TURNS, ld64(engine + S.TURNS) + 1)
        _turn(engine)
        look_in -= _rest(engine)
        if unlikely(look_in <= 0):
            look_in = _LOOK_AFTER
            _tick(engine, clock_ns(engine))
    program = ld64(engine + S.PROGRAM)
    if ld64(engine + S.FAULT) != 0 and program != 0:
        _c_program(program, ld64(engine + S.PROGRAM_STATE))
    st64_release(engine + S.PHASE, S.ENDED)
    return ld64(engine + S.FAULT)
