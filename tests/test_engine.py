"""The transfer engine: the conformance suite over every network at hand, then what it adds."""

from __future__ import annotations

import functools
from typing import Any

import fake_nic
import pytest
import transport_conformance as conformance
from engines import check_all, on_fake, open_fake, options
from fake_nic import FakeNetwork
from threads import run_threads

import moecomm as mc
from moecomm.group import Group
from moecomm.transport.base import Memory, Transfer
from moecomm.transport.engine import TransferEngine

ROUGH = {fake_nic.REORDER: 1, fake_nic.DELAY: 3, fake_nic.REFUSE: 5}

MEMORY = list(conformance.MEMORY_CHECKS)
TRANSFER = list(conformance.TRANSFER_CHECKS)


def fake_conforms(group: Group, network: FakeNetwork, names: list[str], **changes: Any) -> None:
    check_all(group, lambda g: open_fake(g, network, **changes), names)


@pytest.mark.parametrize(
    ("num_ranks", "num_nics", "depth", "changes"),
    [
        (1, 1, 64, {}),
        (2, 1, 4, {"rx_depth": 4}),
        (3, 2, 16, {"rx_depth": 8}),
        (8, 1, 4, {"rx_depth": 8}),
    ],
    ids=["alone", "depth 4", "2 NICs", "8 ranks, depth 4"],
)
def test_conforms_on_an_unordered_network(
    num_ranks: int, num_nics: int, depth: int, changes: dict[str, int]
) -> None:
    network = FakeNetwork(num_ranks, num_nics, depth=depth, words=ROUGH)
    names = TRANSFER if num_ranks == 1 else [*TRANSFER, *MEMORY]
    run_threads(functools.partial(fake_conforms, **changes), num_ranks, network, names)
    network.check_promises()


# ---- libfabric ----------------------------------------------------------------------------------


def open_fabric(group: Group, fabric: str, num_nics: int) -> TransferEngine:
    from moecomm.transport.efa import open_engine

    return open_engine(group, fabric, num_nics=num_nics, options=options())


def fabric_conforms(group: Group, fabric: str, num_nics: int, names: list[str]) -> None:
    check_all(group, lambda g: open_fabric(g, fabric, num_nics), names)


@pytest.mark.parametrize(
    ("fabric", "num_ranks", "num_nics"),
    [("tcp", 2, 2), ("tcp", 4, 1), ("shm", 2, 2), ("shm", 3, 1)],
)
def test_conforms_over_libfabric(fabric: str, num_ranks: int, num_nics: int) -> None:
    mc.run(fabric_conforms, num_ranks, fabric, num_nics, [*TRANSFER, *MEMORY], timeout_s=100)


def test_it_implements_the_protocols() -> None:
    def check(engine: TransferEngine, group: Group) -> None:
        assert isinstance(engine, Memory)
        assert isinstance(engine, Transfer)

    on_fake(check, FakeNetwork(1))
