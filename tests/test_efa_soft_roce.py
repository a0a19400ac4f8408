"""``transport="efa"`` over libfabric's verbs provider: the nearest to EFA that needs no such device
(memory by address and key, 4 bytes of immediate, errors for wrong keys, EAGAIN)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transport_conformance as conformance
from forked import run_forked
from test_transport_verbs import HARD, SMALL

from moecomm.group import Group
from moecomm.transport.efa import open_engine
from moecomm.transport.engine import EngineOptions, TransferEngine, jit

pytestmark = pytest.mark.nic

# Queues of one connection for each peer: by default they do not fit into a soft-RoCE device's.
VARIABLES = {
    "FI_UNIVERSE_SIZE": "8",
    "FI_OFI_RXM_MSG_TX_SIZE": "128",
    "FI_OFI_RXM_MSG_RX_SIZE": "128",
}
if Path("/sys/class/infiniband/rxe1").exists():
    # rxe0 is on the loopback interface, where libfabric's way of connecting does not work.
    VARIABLES["FI_VERBS_DEVICE_NAME"] = "rxe1"


def prepare() -> None:
    """Compile what ranks load."""
    jit.load("moecomm.transport.efa.hot", "moecomm.transport.engine.loop")


def open_it(group: Group) -> TransferEngine:
    os.environ.update(VARIABLES)
    options = EngineOptions(**{**SMALL, "timeout_s": 60.0})
    return open_engine(group, "verbs", options=options)


def check_all(group: Group, names: list[str]) -> None:
    conformance.TIMEOUT_S = 100.0  # an emulated machine, perhaps on a busy one
    for name in names:
        conformance.run_check(group, open_it, name)


def test_conformance() -> None:
    prepare()
    run_forked(check_all, 2, HARD)
