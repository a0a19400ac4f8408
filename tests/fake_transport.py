"""A transport whose network is ``fake_nic``: unordered, slow, failing on demand. Ranks are threads;
which node a rank is on is pretended. ``with network(...) as net:`` and ``transport="fake"``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_nic import DELAY, REFUSE, REORDER, FakeNetwork
from threads import run_threads

import moecomm as mc
from moecomm import transport
from moecomm.transport.engine import EngineOptions, TransferEngine

WILD = {REORDER: 1, DELAY: 3, REFUSE: 20}

_current: list[FakeNetwork] = []


def preflight() -> None:
    """There always is one."""


def has_device() -> bool:
    """For ``auto``, which is not to take it."""
    return False


def open_engine(group: mc.Group, *, options: EngineOptions) -> TransferEngine:
    return TransferEngine(group, _current[-1].openers(group.rank), options=options)


@contextlib.contextmanager
def network(
    num_ranks: int,
    node_size: int,
    num_nics: int = 1,
    bounce: bool | None = None,
    **fields: Any,
) -> Iterator[Any]:
    """A new network, which communicators opened inside use; one after the other, since a NIC has
    one owner. ``bounce``: whether bytes take one; ``None``: as the environment says."""
    net = FakeNetwork(num_ranks, num_nics, **{"words": WILD, **fields})
    _current.append(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_NODE_SIZE", str(node_size))
        if bounce is not None:
            patch.setenv("MOECOMM_BOUNCE", str(int(bounce)))
        patch.setitem(transport.NETWORKS, "fake", "fake_transport")
        patch.setitem(transport.TRANSPORTS, "fake", "fake_transport")
        try:
            yield net
        finally:
            _current.pop()


def on_nodes(
    work: Callable[..., Any], num_ranks: int, node_size: int, *args: Any, **fields: Any
) -> list[Any]:
    """``work(group, *args)`` on ranks of nodes that a wild network joins; promises checked."""
    with network(num_ranks, node_size, **fields) as net:
        results = run_threads(work, num_ranks, *args)
        net.check_promises()
    return results
