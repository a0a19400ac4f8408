"""Python's ends of the two rings that it shares with the loop."""

from __future__ import annotations

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.jit import hot
from moecomm.transport.engine.lines import copy_post
from moecomm.transport.engine.native import ld32, ld64, ld64_acquire, st32, st64_release


@hot("int64(int64, int64, int64)")
def submit(engine, commands, count):
    """Put commands into the ring, as many as there is room for; how many."""
    tail, size = ld64(engine + S.TAIL), ld64(engine + S.RING_SIZE)
    count = min(count, size - (tail - ld64_acquire(engine + S.HEAD)))
    ring = ld64(engine + S.RING)
    for n in range(count):
        entry = ring + ((tail + n) & (size - 1)) * R.POST_BYTES
        copy_post(entry, commands + n * R.POST_BYTES)
    st64_release(engine + S.TAIL, tail + count)
    return count


@hot("int64(int64, int64, int64, int64)")
def collect(engine, head, operations, capacity):
    """Copy the numbers (u32) of operations reported after the first ``head``; how many."""
    count = min(ld64_acquire(engine + S.DONE_TAIL) - head, capacity)
    done, size = ld64(engine + S.DONE), ld64(engine + S.DONE_SIZE)
    for n in range(count):
        st32(operations + n * 4, ld32(done + ((head + n) & (size - 1)) * 4))
    return count


@hot("int64(int64)")
def load(address):
    """A word that the loop writes, and whatever was stored before it."""
    return ld64_acquire(address)


@hot("void(int64, int64)")
def store(address, value):
    """A word that the loop reads, after whatever was stored before."""
    st64_release(address, value)
