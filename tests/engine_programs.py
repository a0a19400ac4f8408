"""Programs for the engine's loop, as the MoE exchange has one."""

from __future__ import annotations

from typing import Final

from transport_conformance import registered

from moecomm.group import Group
from moecomm.transport.base import Region
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine import program as P
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.jit import hook
from moecomm.transport.engine.native import ld64, st64

ENGINE: Final = 0
OP: Final = 8
PEER: Final = 16
LOCAL: Final = 24
LOCAL_KEY: Final = 32
REMOTE: Final = 40
REMOTE_KEY: Final = 48
LEFT: Final = 56  # hops still to come
SEEN: Final = 64  # arrivals whose payload was right
MINE: Final = 72  # where the payload arrives
FIRST: Final = 80  # 1: begins
_IMM: Final = 77


@hook("int64(int64)")
def RING(state):
    """Each arrival sends the next payload, one more than the last, to the next rank."""
    engine, op = ld64(state + ENGINE), ld64(state + OP)
    if ld64(state + LEFT) == 0 or not P.is_done(engine, op) or P.room(engine) == 0:
        return 0
    value = 0
    if ld64(state + FIRST) != 0:
        st64(state + FIRST, 0)
    else:
        if not P.take(engine, _IMM, 1):
            return 0
        value = ld64(ld64(state + MINE))
        st64(state + SEEN, ld64(state + SEEN) + 1)
        st64(state + LEFT, ld64(state + LEFT) - 1)
        if P.error_of(engine, op) != 0 or P.aborted_by(engine) >= 0:
            return -1
    st64(ld64(state + LOCAL), value + 1)
    P.begin(engine, op, 1)
    P.write(
        engine, op, 0, ld64(state + PEER), ld64(state + LOCAL), ld64(state + LOCAL_KEY), 8,
        ld64(state + REMOTE), ld64(state + REMOTE_KEY), _IMM,
    )  # fmt: skip
    return 1


@hook("int64(int64)")
def FLOOD(state):
    """``LEFT`` writes at once, with immediates counting down to 0."""
    engine, op, left = ld64(state + ENGINE), ld64(state + OP), ld64(state + LEFT)
    if left == 0:
        return 0
    P.begin(engine, op, left)
    for n in range(left):
        P.write(
            engine, op, 0, ld64(state + PEER), ld64(state + LOCAL), ld64(state + LOCAL_KEY), 8,
            ld64(state + REMOTE), ld64(state + REMOTE_KEY), left - 1 - n,
        )  # fmt: skip
    st64(state + LEFT, 0)
    return 1


@hook("int64(int64)")
def FAILING(state):
    return -42


def ring_state(engine: TransferEngine, group: Group, hops: int) -> Block:
    """What ``RING`` works on, and ``FLOOD``."""
    inbox = engine.allocate(64)
    outbox = engine.allocate(64)
    after = (group.rank + 1) % group.size
    remote = engine.remote_place(registered(engine, group, inbox)[after], 0)
    local = engine.local_place(Region(outbox.address, 8), 0)
    block = Block(128)
    for offset, value in {
        ENGINE: engine.state,
        OP: engine.program_operations[0],
        PEER: after,
        LOCAL: local.address,
        LOCAL_KEY: local.key,
        REMOTE: remote.address,
        REMOTE_KEY: remote.key,
        LEFT: hops,
        MINE: inbox.address,
        FIRST: int(group.rank == 0),
    }.items():
        block.put(offset, "=Q", value)
    return block
