"""``transport="efa"`` over libfabric's verbs provider: the nearest to EFA that needs no such device
(memory by address and key, 4 bytes of immediate, errors for wrong keys, EAGAIN)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transport_conformance as conformance
from forked import run_forked
from test_transport_verbs import HARD, SMALL, refused
from verbs_ends import End

from moecomm.group import Group
from moecomm.transport.efa import abi, open_engine, openers
from moecomm.transport.efa.library import half, word
from moecomm.transport.engine import EngineOptions, TransferEngine, jit, records
from moecomm.transport.engine.provider import MAX_BURST, Sizing

pytestmark = pytest.mark.nic

# Queues of one connection for each peer: by default they do not fit into a soft-RoCE device's.
QUEUE = 128
VARIABLES = {
    "FI_UNIVERSE_SIZE": "8",
    "FI_OFI_RXM_MSG_TX_SIZE": str(QUEUE),
    "FI_OFI_RXM_MSG_RX_SIZE": str(QUEUE),
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


def check_all(group: Group, names: list[str]) -> str:
    conformance.TIMEOUT_S = 100.0  # an emulated machine, perhaps on a busy one
    for name in names:
        conformance.run_check(group, open_it, name)
    return refused(group, open_it)


def test_conformance_and_memory_that_the_peer_does_not_open() -> None:
    prepare()
    text = run_forked(check_all, 2, HARD)[0]
    assert text.startswith("rank 0: a write of 8192 bytes to rank 1 by ")
    assert "(verbs) failed: " in text
    assert "remote access error" in text


class Alone:
    """An interface that is connected to itself, and posted to without an engine, which would not
    let its queue run full."""

    def __init__(self) -> None:
        os.environ.update(VARIABLES)
        (opener,) = openers("verbs")
        sizing = Sizing(1, tx_depth=8 * QUEUE, rx_depth=8 * QUEUE, message_bytes=0, num_messages=0)
        self.nic: Any = opener.open(sizing)
        self.nic.connect([self.nic.address()], 60.0)
        self.end = End(self.nic, 4096)

    def fill_the_queue(self) -> tuple[int, list[int], list[int]]:
        """How many writes were taken before the first was refused; contexts and immediates that
        came in the end."""
        end, count = self.end, 4 * QUEUE
        assert self.nic.limits.tx_depth >= count  # not we, the provider refuses
        left = [
            end.write(end, 0, context=n, nbytes=256, imm=(n << 23) & 0xFFFFFFFF | n)
            for n in range(count)
        ]
        sent: list[int] = []
        came: list[int] = []
        first = taken = 0
        while len(sent) + len(came) < 2 * count:
            accepted = end.post(*left[:MAX_BURST]) if left else 0
            left, taken = left[accepted:], taken + accepted
            if accepted == MAX_BURST:
                continue  # until it is refused, nothing is polled
            first = first or taken
            events = end.poll()
            sent += [e.context for e in events if e.kind == records.SENT]
            came += [e.imm for e in events if e.kind == records.ARRIVED]
        return first, sent, came


def alone(group: Group) -> tuple[int, int, tuple[int, list[int], list[int]]]:
    """``mr_mode``, bytes of an immediate, and what a full queue does."""
    one = Alone()
    domain = word(one.nic._end._info, abi.INFO_DOMAIN_ATTR)
    found = half(domain, abi.DOMAIN_MR_MODE), word(domain, abi.DOMAIN_CQ_DATA_SIZE)
    assert one.end.registration.remote_base == one.end.region.address
    filled = one.fill_the_queue()
    one.nic.close()
    return *found, filled


def test_it_asks_what_efa_asks_and_refuses_what_does_not_fit() -> None:
    prepare()
    mr_mode, imm_bytes, (first, sent, came) = run_forked(alone, 1)[0]
    # LOCAL, VIRT_ADDR, ALLOCATED and PROV_KEY, as EFA; tcp and shm want none of them.
    assert mr_mode == 1 << 2 | 1 << 4 | 1 << 5 | 1 << 6
    assert imm_bytes == 4
    count = 4 * QUEUE
    assert QUEUE / 2 < first <= QUEUE  # EAGAIN; efa: at the depth of its send queue
    assert sorted(sent) == list(range(count))
    assert sorted(came) == sorted((n << 23) & 0xFFFFFFFF | n for n in range(count))
