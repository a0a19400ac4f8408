"""Ranks on two machines that nothing but soft-RoCE joins; the machines are virtual."""

from __future__ import annotations

import faulthandler
import os
import re

import pytest
from vm import machine, plugin, two_nodes
from vm.across import DEAD, NUM_RANKS, STEPS

STRICT = plugin.mode() == "required" or os.environ.get("MOECOMM_TEST_STRICT") == "1"
MISSING = "MOECOMM_TEST_VM=off" if plugin.mode() == "off" else machine.missing()


@pytest.mark.xdist_group("guest")  # not beside the other virtual machine
@pytest.mark.skipif(bool(MISSING) and not STRICT, reason=f"needs virtual machines: {MISSING}")
def test_exchanges_between_two_machines_and_a_rank_that_dies() -> None:
    """Each rank has compared every step with the reference; here is counted that it came so far,
    and whom it missed then."""
    faulthandler.cancel_dump_traceback_later()
    status, said = two_nodes.run(["exchange"])
    assert status == 0, said
    reports = re.findall(
        r"^node (\d): rank (\d): (\d+) steps in .* waiting for rank (\d)", said, re.M
    )
    assert sorted(reports) == [
        (str(rank // 2), str(rank), str(STEPS), str(DEAD))
        for rank in range(NUM_RANKS)
        if rank != DEAD
    ]
    assert "node 1: killed" in said
