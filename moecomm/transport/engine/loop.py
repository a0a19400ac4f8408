"""The hot loop: one function that a worker thread runs without the GIL until it is told to stop.

One turn: the program, credit writes, lines of waiting commands, new commands, then *every* NIC is
polled. The order matters in one way: nothing waits for a queue to drain, because a peer's set-up
or its queue may depend on any of this rank's NICs being polled (the first write to a peer gives
EAGAIN until both sides have polled).
"""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.arrivals import expect, forget, piece_done
from moecomm.transport.engine.credits import grant, serve_credits
from moecomm.transport.engine.events import end_engine, poll
from moecomm.transport.engine.jit import flat, hot, inner
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
)
from moecomm.transport.engine.posting import (
    admit,
    end_channel,
    flush,
    lose_posts,
    make_room,
    serve_lines,
    withdraw,
)
from moecomm.transport.engine.program import clock_ns
from moecomm.transport.engine.provider import MAX_BURST

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
            end_engine(engine, S.NO_MEMORY, 0, 0)
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


@inner
def _has_places(engine):
    """Whether a command may be taken: a whole batch of each NIC may yet be put back."""
    return ld64(engine + S.WAITING_COUNT) > MAX_BURST * ld64(engine + S.NUM_NICS)


@inner
def _take(engine, ring, head_at, count):
    """Obey up to ``count`` commands of one ring; how many."""
    mask = ld64(engine + S.RING_SIZE) - 1
    head = ld64(engine + head_at)
    taken = 0
    while taken < count and _has_places(engine):
        _obey(engine, ring + ((head + taken) & mask) * R.POST_BYTES)
        taken += 1
    st64_release(engine + head_at, head + taken)
    return taken


@flat
def _drain(engine, ring, head_at, tail):
    """Obey commands of one ring; how many."""
    count = tail - ld64(engine + head_at)
    return _take(engine, ring, head_at, min(count, _COMMANDS_PER_TURN)) if count > 0 else 0


@flat
def _drain_program(engine):
    """The same for the ring whose producer is this thread. An empty one starts over: its first
    entries are still in the cache, and of 4096 the next ones are not."""
    done = _drain(
        engine, ld64(engine + S.PROGRAM_RING), S.PROGRAM_HEAD, ld64(engine + S.PROGRAM_TAIL)
    )
    if done > 0 and ld64(engine + S.PROGRAM_HEAD) == ld64(engine + S.PROGRAM_TAIL):
        st64(engine + S.PROGRAM_HEAD, 0)
        st64(engine + S.PROGRAM_TAIL, 0)
    return done


# ---- Clock --------------------------------------------------------------------------------------


@inner
def _look_for_aborts(engine):
    if ld64(engine + S.ABORTED_BY) != 0:
        return
    for peer in range(ld64(engine + S.NUM_PEERS)):
        code = ld64_acquire(ld64(engine + S.ABORT_WORDS) + peer * S.ROW_BYTES + S.ROW_ABORT)
        if code != 0:
            st64(engine + S.ABORT_CODE, code)
            st64_release(engine + S.ABORTED_BY, peer + 1)
            return


@inner
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


@inner
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
    for nic in range(ld64(engine + S.NUM_NICS)):
        grant(engine, nic)


@flat
def _rest(engine):
    """After a turn in which nothing happened: spin, then give up the processor, then sleep; what
    that counts towards the next look at the clock."""
    idle = ld64(engine + S.IDLE) + 1
    st64(engine + S.IDLE, idle)
    if idle & 15 == 0:
        for nic in range(ld64(engine + S.NUM_NICS)):
            grant(engine, nic)
    spin = ld64(engine + S.SPIN_TURNS)
    if idle <= spin:
        return 1  # no pause instruction: it takes longer than all the rest of an idle turn
    if idle <= spin + ld64(engine + S.YIELD_TURNS):
        _c_yield(ld64(engine + S.SCHED_YIELD))
        return _YIELDED
    _c_usleep(ld64(engine + S.USLEEP), ld64(engine + S.SLEEP_US))
    return _LOOK_AFTER


@flat
def _turn(engine, scratch):
    """Everything once; how much happened."""
    nics = ld64(engine + S.NUM_NICS)
    done = 0
    for nic in range(nics):
        st64(nic_at(engine, nic) + S.NIC_FULL, 0)
    program = ld64(engine + S.PROGRAM)
    if program != 0:
        did = _c_program(program, ld64(engine + S.PROGRAM_STATE))
        if did < 0:
            end_engine(engine, S.PROGRAM_FAILED, -did, 0)
        done += did
    done += serve_credits(engine, scratch)
    done += serve_lines(engine, _CHANNELS_PER_TURN)
    done += _drain_program(engine)
    done += _drain(engine, ld64(engine + S.RING), S.HEAD, ld64_acquire(engine + S.TAIL))
    for nic in range(nics):
        flush(engine, nic_at(engine, nic))
    for nic in range(nics):
        done += poll(engine, nic)
    return done


@hot("int64(int64, int64)")
def run(engine, scratch):
    """Run until ``COMMAND`` is ``STOP`` or something ends the engine; what did (``FAULT``).

    ``scratch``: ``POST_BYTES`` of this thread's own.
    """
    st64(engine + S.NOW, clock_ns(engine))
    st64_release(engine + S.PHASE, S.RUNNING)
    look_in = _LOOK_AFTER
    while ld64(engine + S.FAULT) == 0:
        command = ld64_acquire(engine + S.COMMAND)
        if command == S.STOP:
            break
        if command == S.PAUSE:
            st64_release(engine + S.PHASE, S.PAUSED)
            _c_usleep(ld64(engine + S.USLEEP), _PAUSE_US)
            continue
        if ld64(engine + S.PHASE) != S.RUNNING:
            st64_release(engine + S.PHASE, S.RUNNING)
        st64(engine + S.TURNS, ld64(engine + S.TURNS) + 1)
        if _turn(engine, scratch) > 0:
            st64(engine + S.IDLE, 0)
            look_in -= _LONG_TURN
        else:
            look_in -= _rest(engine)
        if look_in <= 0:
            look_in = _LOOK_AFTER
            _tick(engine, clock_ns(engine))
    program = ld64(engine + S.PROGRAM)
    if ld64(engine + S.FAULT) != 0 and program != 0:
        _c_program(program, ld64(engine + S.PROGRAM_STATE))
    st64_release(engine + S.PHASE, S.ENDED)
    return ld64(engine + S.FAULT)
