"""Engines for tests: over the fake network with ranks as threads, or over libfabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transport_conformance as conformance
from fake_nic import FakeNetwork
from threads import run_threads

from moecomm.group import Group
from moecomm.transport.engine import EngineOptions, TransferEngine, jit

# Compiled here, once, so that no rank's time limit has to cover it.
jit.load("moecomm.transport.engine.loop", "moecomm.transport.engine.ring")

# Many workers share few cores in tests: they give up the processor early.
SHARED = {"spin_turns": 50, "yield_turns": 2000, "sleep_us": 50}


def options(**changes: Any) -> EngineOptions:
    """Options for engines that share cores, and small messages as the fake network has them."""
    return EngineOptions(**{**SHARED, "message_bytes": 256, "timeout_s": 20.0, **changes})


def open_fake(group: Group, network: FakeNetwork, **changes: Any) -> TransferEngine:
    """This rank's engine on the fake network."""
    return TransferEngine(group, network.openers(group.rank), options=options(**changes))


def on_fake(
    work: Callable[[TransferEngine, Group], Any], network: FakeNetwork, **changes: Any
) -> list[Any]:
    """``work(engine, group)`` on all ranks of the network; results by rank."""

    def one(group: Group) -> Any:
        with open_fake(group, network, **changes) as engine:
            result = work(engine, group)
            group.barrier()
            return result

    return run_threads(one, network.num_ranks)


def check_all(
    group: Group, open_it: Callable[[Group], Any], names: list[str], shared: bool = False
) -> None:
    """Conformance checks, one after the other; ``shared``: on one engine, as far as checks let it
    live."""
    for name in names:
        try:
            conformance.run_check(group, open_it, name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise
