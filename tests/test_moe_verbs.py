"""MoeComm between ranks that only soft-RoCE joins: bit for bit as the reference, also through
handles out of order, steps without a token, and overflows; and a rank that dies."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

import pytest
from exchange import make_case, run_case
from forked import die, run_forked
from proxied import BASE, Trial, try_all

import moecomm as mc
from moecomm.transport.engine import jit

pytestmark = pytest.mark.nic

# The machine is emulated: few tokens, and patience.
SMALL: dict[str, Any] = {"num_experts": 6, "hidden": 48, "max_tokens": 5, "timeout_s": 60.0}
CAPPED = {**SMALL, "layout": "rank"}
FP8 = {**SMALL, "layout": "grouped", "dispatch_dtype": "float8_e4m3fn", "scale_block": 16}
SENDER = {**SMALL, "layout": "grouped", "reduce": "sender", "expert_alignment": 4}
MANY = {**SMALL, "hidden": 8, "max_tokens": 40, "top_k": 1}  # more records than are private

TRIALS = [
    Trial(2, 1, 30, SENDER),
    Trial(3, 1, 20, FP8),
    Trial(4, 1, 15, {**SMALL, "replicas": 2}),
    Trial(4, 2, 15, {**CAPPED, "max_recv_tokens": 19}),
    Trial(2, 1, 20, MANY),
]
CASES = {4: TRIALS}
# Too long for every time: MOECOMM_TEST_EXAMPLES=1000 takes so many steps on up to 8 ranks. See
# docs/verbs.md.
STEPS = int(os.environ.get("MOECOMM_TEST_EXAMPLES", "0"))
if STEPS:
    CASES[8] = [
        Trial(2, 1, STEPS * 6 // 10, MANY),
        Trial(5, 2, STEPS * 2 // 10, SENDER),
        Trial(7, 3, STEPS // 10, {**CAPPED, "max_recv_tokens": 34}),
        Trial(8, 1, STEPS // 20, FP8),
        Trial(8, 1, STEPS // 20, {**SMALL, "replicas": 2}),
    ]


def prepare() -> None:
    """Compile what ranks load, the emulated kernels included: over tcp, which is everywhere."""
    jit.load("moecomm.transport.verbs.hooks", "moecomm.transport.engine.loop")
    for num_ranks, trials in CASES.items():
        check(num_ranks, [dataclasses.replace(trial, steps=2) for trial in trials], "efa")


@pytest.mark.parametrize("num_ranks", CASES)
def test_equals_the_reference(num_ranks: int) -> None:
    """Replicas on several nodes; some peers within reach, some not."""
    check(num_ranks, CASES[num_ranks], "verbs", timeout_s=280 + 2 * STEPS)


def check(num_ranks: int, trials: list[Trial], transport: str, **limit: float) -> None:
    for rank, wrong in enumerate(run_forked(try_all, num_ranks, trials, transport, **limit)):
        assert wrong.keys() == {str(trial) for trial in trials if rank < trial.ranks}
        assert not any(wrong.values()), wrong


TIMEOUT_S = 10.0  # several times what soft-RoCE's retries take


def test_c02_a_killed_peer_is_named() -> None:
    """By both others, whoever of them finds out; in time, with a clean end."""
    first, dead, last = run_forked(survive, 3, "verbs")
    assert dead is None
    for peer, waited, closing, threads in (first, last):
        assert peer == 1
        assert waited < TIMEOUT_S
        assert closing < TIMEOUT_S
        assert set(threads) <= {"MainThread", "moecomm-store"}, threads


def survive(group: mc.Group, transport: str) -> tuple[int, float, float, list[str]]:
    """Whom this rank names after how long, how long its end takes, and the threads left."""
    os.environ["MOECOMM_NODE_SIZE"] = "1"
    cfg = mc.MoeConfig(**{**BASE, **SENDER, "timeout_s": TIMEOUT_S})
    case = make_case(cfg, 3, tokens=(5, 5, 5), dropped=0.0)
    comm = mc.MoeComm(cfg, group, transport)
    for _ in range(3):
        run_case(comm, case)
    group.barrier(100)
    if group.rank == 1:
        die()
    peer = -1
    while peer < 0:
        started = time.monotonic()
        try:
            run_case(comm, case)
        except mc.PeerTimeout as error:
            peer = error.peer
    waited, closing = time.monotonic() - started, time.monotonic()
    comm.close()
    closing = time.monotonic() - closing
    return peer, waited, closing, [t.name for t in threading.enumerate()]
