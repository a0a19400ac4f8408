"""``transport="verbs"``: the engine over RDMA devices, with ranks as processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import transport_conformance as conformance
from fork_checks import fork_after_registering
from forked import die, run_forked
from transport_conformance import fill, payload, pump, read, registered

from moecomm.errors import TransportError
from moecomm.group import Group
from moecomm.transport.engine import EngineOptions, TransferEngine, jit
from moecomm.transport.verbs import open_engine
from moecomm.transport.verbs.devices import choose_ports

pytestmark = pytest.mark.nic

# Workers and the tests' own loops share few processors.
SHARED = {"spin_turns": 50, "yield_turns": 2000, "sleep_us": 50}
# Filling in an engine's tables takes a while on an emulated machine.
SMALL = {**SHARED, "commands": 256, "operations": 512, "program_operations": 16, "tx_depth": 128}
ALL = [*conformance.MEMORY_CHECKS, *conformance.TRANSFER_CHECKS]
HARD = [
    "writes_of_nothing_and_of_much",
    "notify_may_use_the_transport",
    "scatter_gives_each_peer_its_slice",
    "random_traffic_is_exact",
]


def prepare() -> None:
    """Compile what ranks load: once, before they are forked."""
    jit.load("moecomm.transport.verbs.hooks", "moecomm.transport.engine.loop")


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


def open_it(group: Group, sizes: dict[str, int] | None = None, **how: Any) -> TransferEngine:
    options = EngineOptions(**{**SMALL, "timeout_s": 60.0, **(sizes or {})})
    return open_engine(group, options=options, **how)


def check_all(
    group: Group, names: list[str], sizes: dict[str, int], how: dict[str, Any]
) -> dict[str, float]:
    seconds = {}
    conformance.TIMEOUT_S = 100.0  # an emulated machine, perhaps on a busy one
    for name in names:
        start = time.monotonic()
        try:
            conformance.run_check(group, lambda g: open_it(g, sizes, **how), name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise
        seconds[name] = time.monotonic() - start
    return seconds


@pytest.mark.parametrize(
    ("num_ranks", "names", "sizes", "how"),
    [
        (2, ALL, {}, {"num_nics": 1}),
        (3, HARD, {}, {}),
        (2, HARD, {"tx_depth": 4, "rx_depth": 4}, {"num_nics": 1}),
        (2, HARD[1:3], {}, {"bootstrap": "store"}),
    ],
    ids=["one-port", "all-ports", "queue-depth-4", "over-a-store"],
)
def test_conformance(
    num_ranks: int, names: list[str], sizes: dict[str, int], how: dict[str, Any]
) -> None:
    run_forked(check_all, num_ranks, names, sizes, how)


def killed(group: Group) -> tuple[int | None, str, float]:
    """Rank 2 dies; what rank 0 sees of that, while rank 1 goes on."""
    engine = open_it(group)
    region = engine.allocate(4096)
    remote = registered(engine, group, region)
    src = engine.allocate(4096)
    fill(src, payload(group.rank, 0, 4096))
    group.barrier()
    if group.rank == 2:
        die()
    if group.rank == 1:
        came: list[int] = []
        engine.expect(1, 50, lambda: came.append(1))
        pump(engine, lambda: bool(came))
        assert read(region) == payload(0, 0, 4096)
        return None, "", 0.0
    for _ in range(50):
        engine.write(src, remote[1], 1)
    start, error = time.monotonic(), None
    while error is None and time.monotonic() < start + 30:
        operation = engine.write(src, remote[2])  # the first ones may find it still there
        try:
            pump(engine, lambda op=operation: op.done)
        except TransportError as caught:
            error, seconds = caught, time.monotonic() - start
    pump(engine, lambda: engine.outstanding == 0)
    assert error is not None
    engine.close()
    return error.peer, str(error), seconds


def test_a_killed_peer_is_named_and_the_others_go_on() -> None:
    peer, text, seconds = run_forked(killed, 3)[0]
    assert peer == 2
    assert "rank 2" in text
    assert seconds < 15  # soft-RoCE's retries take 1 s where nobody else uses the processors


def refused(group: Group, how: Callable[[Group], TransferEngine]) -> str:
    """Rank 0 writes with a key that rank 1 has not given; what it is told."""
    with how(group) as engine:
        region = engine.allocate(8192)
        remote = registered(engine, group, region)
        wrong = type(remote[1])(1, remote[1].address, remote[1].nbytes, _spoilt(remote[1].key))
        text = ""
        if group.rank == 0:
            operation = engine.write(region, wrong, 5)
            with pytest.raises(TransportError) as caught:
                pump(engine, lambda: operation.done)
            assert caught.value.peer == 1
            assert caught.value.operation == "write"
            text = str(caught.value)
        group.barrier()
        return text


def _spoilt(key: bytes) -> bytes:
    return key[:-1] + bytes([key[-1] ^ 0x5A])


def test_memory_that_the_peer_does_not_open() -> None:
    text = run_forked(refused, 2, partial(open_it, num_nics=1))[0]
    for part in ("IBV_WC_REM_ACCESS_ERR", str(choose_ports()[0]), "rank 1"):
        assert part in text


def fork(group: Group) -> None:
    fork_after_registering(group, partial(open_it, num_nics=1))


def test_f13_a_fork_after_registering_leaves_both_processes_their_memory() -> None:
    run_forked(fork, 2)
