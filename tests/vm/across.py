"""What ranks on two virtual machines do: exchanges, bit for bit as the reference, then one in which
a rank dies between dispatch and combine. Nothing but soft-RoCE joins the machines."""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np
import pytest
from exchange import Case, make_case, run_case
from forked import die, run_forked
from proxied import BASE
from schedules import dispatch_arguments, for_rank, random_schedule, walk
from test_moe_verbs import FP8

import moecomm as mc
from moecomm.store import TcpStore
from moecomm.transport.engine import jit

RANKS_A_NODE: Final = 2
NUM_RANKS: Final = 2 * RANKS_A_NODE
STEPS: Final = 36
SERVER: Final = "10.77.0.1"  # node 0's address, see init
DEAD: Final = 3  # on node 1; nobody on node 0 shares memory with it
WAIT_S: Final = 200.0
# Of the one that runs in one machine: its kernels are compiled anyway.
CFG: Final = mc.MoeConfig(**{**BASE, **FP8, "timeout_s": 20.0})


def exchange(group: mc.Group, transport: str) -> str:
    """``STEPS`` steps, two in flight, in an order of each rank's own; then one that fails. What
    this rank saw of the latter."""
    cases = [make_case(CFG, group.size, seed, skew=0.2 * seed) for seed in range(3)]
    schedule = random_schedule(np.random.default_rng(3), STEPS, CFG.in_flight, closed=0.1)
    survivors = group.subgroup([rank for rank in range(group.size) if rank != DEAD])
    with mc.MoeComm(CFG, group, transport) as comm:
        started = time.monotonic()
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        took = time.monotonic() - started
        group.barrier(WAIT_S)
        if survivors is None:
            comm.dispatch(*dispatch_arguments(cases[0], group.rank))
            die()
        asked = time.monotonic()
        with pytest.raises(mc.PeerTimeout) as caught:
            _go_on(comm, cases[0])
        waited = time.monotonic() - asked
    error = caught.value
    assert error.peer == DEAD, str(error)
    assert waited < 2 * CFG.timeout_s
    survivors.barrier(WAIT_S)  # the store is one of theirs
    return f"rank {group.rank}: {STEPS} steps in {took:.1f} s, then after {waited:.1f} s: {error}"


def _go_on(comm: mc.MoeComm, case: Case) -> None:
    while True:
        run_case(comm, case)


def rank(mates: mc.Group, node: int) -> str:
    """A rank of ``node``; ``mates`` are the ranks of this machine."""
    os.environ.update(MOECOMM_POISON="1")
    number = node * RANKS_A_NODE + mates.rank
    with (
        TcpStore(SERVER, 29501, serve=number == 0, timeout_s=WAIT_S) as store,
        mc.Group(number, NUM_RANKS, store) as group,
    ):
        return exchange(group, "verbs")


def prepare() -> None:
    """Compile what ranks load, the emulated kernels included: over tcp, which is everywhere."""
    os.environ.update(MOECOMM_NODE_SIZE=str(RANKS_A_NODE), MOECOMM_FABRIC="tcp")
    jit.load("moecomm.transport.verbs.hooks", "moecomm.transport.engine.loop")
    run_forked(exchange, NUM_RANKS, "efa")
