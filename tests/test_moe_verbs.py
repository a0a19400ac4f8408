"""MoeComm between ranks that only soft-RoCE joins: bit for bit as the reference."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from exchange import make_case
from forked import run_forked
from schedules import for_rank, random_schedule, walk

import moecomm as mc
from moecomm.transport.engine import jit

pytestmark = pytest.mark.nic

BASE: dict[str, Any] = {"num_experts": 6, "top_k": 3, "hidden": 48, "max_tokens": 5}
CONFIGS = {
    "grouped-fp8": mc.MoeConfig(
        **BASE, layout="grouped", dispatch_dtype="float8_e4m3fn", scale_block=16
    ),
    "rank": mc.MoeConfig(**BASE, layout="rank"),
    "sender": mc.MoeConfig(**BASE, layout="grouped", reduce="sender", expert_alignment=4),
}
# Each takes the emulated machine most of a minute: one always, all of them when there is time.
CASES = [(3, "grouped-fp8")]
if "MOECOMM_TEST_EXAMPLES" in os.environ:
    CASES += [(2, "sender"), (4, "rank"), (4, "grouped-fp8")]
STEPS = 2


def exchange(group: mc.Group, name: str, transport: str) -> None:
    """Some steps, several in flight, on nodes of one rank."""
    os.environ.update(MOECOMM_NODE_SIZE="1", MOECOMM_POISON="1")
    cfg = CONFIGS[name]
    cases = [make_case(cfg, group.size, seed, skew=0.2 * seed) for seed in range(STEPS)]
    schedule = random_schedule(np.random.default_rng(3), STEPS, cfg.in_flight)
    with mc.MoeComm(cfg, group, transport) as comm:
        walk(comm, cases, for_rank(schedule, np.random.default_rng(group.rank)))
        group.barrier(100)


def prepare() -> None:
    """Compile what ranks load, the emulated kernels included: over tcp, which is everywhere."""
    jit.load("moecomm.transport.verbs.hooks", "moecomm.transport.engine.loop")
    for name in {name for _, name in CASES}:
        run_forked(exchange, 2, name, "efa")


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_equals_the_reference(num_ranks: int, name: str) -> None:
    run_forked(exchange, num_ranks, name, "verbs", timeout_s=280)
