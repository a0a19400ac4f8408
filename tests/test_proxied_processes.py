"""Ranks that are processes of pretended nodes, joined by libfabric over tcp and shm: the code path
of EFA. Every layout, and many steps, bit for bit as the reference."""

from __future__ import annotations

from typing import Any

import pytest
from proxied import Trial, try_all

import moecomm as mc

CONFIGS: list[dict[str, Any]] = [
    {"layout": "batched"},
    {"layout": "batched", "reduce": "sender"},
    {"layout": "grouped", "expert_alignment": 8},
    {"layout": "grouped", "reduce": "sender"},
    {"layout": "rank"},
    {"layout": "rank", "max_recv_tokens": 150},
    {"replicas": 2},
    {"layout": "grouped", "dispatch_dtype": "float8_e4m3fn", "scale_block": 16},
]
STRAIGHT, BOUNCE = {"BOUNCE": 0}, {"BOUNCE": 1}


@pytest.mark.parametrize(("fabric", "node_size"), [("tcp", 1), ("shm", 2)])
def test_every_layout_equals_the_reference(fabric: str, node_size: int) -> None:
    """With and without a bounce: handles out of order, another order on every rank, some closed
    unfinished."""
    ways = [{"FABRIC": fabric, "NICS": 1, **way} for way in (STRAIGHT, BOUNCE)]
    check(4, [Trial(4, node_size, 12, changes, way) for way in ways for changes in CONFIGS])


TCP, SHM = ({"FABRIC": fabric, "NICS": 2} for fabric in ("tcp", "shm"))


def test_a_thousand_steps_over_shm_and_hundreds_over_tcp() -> None:
    """2, 5 and 8 ranks, on nodes of unequal sizes, too; two interfaces; replicas on several nodes;
    steps without a token, and one that overflows; ranks that are late at random."""
    trials = [
        Trial(2, 1, 600, {"layout": "batched"}, SHM | STRAIGHT, late=True),
        Trial(5, 2, 200, {"layout": "grouped", "reduce": "sender"}, SHM | BOUNCE, late=True),
        Trial(8, 1, 100, {"replicas": 2}, SHM | STRAIGHT),
        Trial(8, 3, 100, {"layout": "rank", "max_recv_tokens": 280}, SHM | STRAIGHT),
        Trial(2, 1, 150, {"layout": "grouped", "combine_dtype": "float32"}, TCP | BOUNCE),
        Trial(5, 1, 100, {"layout": "rank"}, TCP | STRAIGHT, late=True),
        Trial(8, 3, 70, {"replicas": 2, "reduce": "sender"}, TCP | STRAIGHT, late=True),
    ]
    check(8, trials)


def check(num_ranks: int, trials: list[Trial]) -> None:
    for rank, wrong in enumerate(
        mc.run(try_all, num_ranks, trials, transport="efa", timeout_s=300)
    ):
        assert wrong.keys() == {str(trial) for trial in trials if rank < trial.ranks}
        assert not any(wrong.values()), wrong
