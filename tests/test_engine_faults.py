"""Each fault of a network ends in an error that names device, peer and operation, on all ranks."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import fake_nic
import pytest
from engines import on_fake, open_fake
from fake_nic import FakeNetwork
from threads import run_threads
from transport_conformance import pump, raised, registered

from moecomm.errors import MoecommError, PeerTimeout, TransportError
from moecomm.group import Group
from moecomm.transport.base import RemoteRegion
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine import state as S

LIMIT_S = 10.0


def until_error(engine: TransferEngine, limit_s: float = LIMIT_S) -> TransportError:
    """Progress until something is raised, as a rank that waits for data would."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if engine.progress() == 0:
                time.sleep(0.0002)
        except TransportError as error:
            return error
    raise AssertionError("no error was raised")


def all_see(
    network: FakeNetwork, fault: Callable[[], None], target: int | None = None, **changes: Any
) -> list[TransportError]:
    """Rank 0 writes to the others, or to ``target``, once ``fault`` has struck; the first to find
    an error gives up. What each rank saw."""

    def work(engine: TransferEngine, group: Group) -> TransportError:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)
        group.barrier()
        if group.rank == 0:
            fault()
            peers = range(1, group.size) if target is None else [target]
            for peer in peers:
                engine.write(region.part(0, 512), remote[peer].part(0, 512), 1)
        if group.rank == 0:
            error = until_error(engine)
        else:
            error = failure_of(lambda: engine.wait_imm(9, timeout_s=1.5, peer=0))
        engine.abort(3)  # also where the peers know already
        group.barrier()
        time.sleep(0.05)  # the loop sends it by itself
        return error

    return on_fake(work, network, **changes)


def test_a_failed_write_is_known_everywhere() -> None:
    network = FakeNetwork(3)

    errors = all_see(network, lambda: network.set(0, fake_nic.FAIL, 1), target=1)
    assert (errors[0].transport, errors[0].operation) == ("fake", "write")
    assert (errors[0].peer, errors[0].code) == (1, 5)
    assert str(errors[0]) == (
        "rank 0: a write of 512 bytes to rank 1 by fake0 (fake) failed: fake error 5 (77)"
    )
    for rank, error in enumerate(errors[1:], 1):  # each passes on that it gives up, too
        assert (error.operation, error.code) == ("abort", 3)
        assert str(error) == f"rank {rank}: rank {error.peer} has given up (code 3)"


def test_a_silent_peer_is_named_when_its_time_is_up() -> None:
    network = FakeNetwork(3)
    errors = all_see(
        network, lambda: network.set(0, fake_nic.SILENT, 1 << 2), target=2, timeout_s=0.5
    )
    assert isinstance(errors[0], PeerTimeout)
    assert (errors[0].phase, errors[0].peer, errors[0].transport) == ("write", 2, "fake")
    assert "rank 0 has given up" in str(errors[1])
    # Nothing from rank 0 reaches rank 2, not even that: rank 1 passes it on.
    assert str(errors[2]) == "rank 2: rank 1 has given up (code 3)"


def test_a_silent_peer_is_given_up_on_a_busy_processor() -> None:
    """Whoever yields gets the processor back after 80 ms, from some twenty others."""
    network = FakeNetwork(2)
    slow = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: time.sleep(0.08) or 0)

    def work(engine: TransferEngine, group: Group) -> float:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)
        group.barrier()
        if group.rank == 1:
            return 0.0
        network.set(0, fake_nic.SILENT, 1 << 1)
        yields = ctypes.cast(slow, ctypes.c_void_p).value or 0
        with engine._resources.worker.paused():
            usual = engine._memory.word(S.SCHED_YIELD)
            engine._memory.set_word(S.SCHED_YIELD, yields)
        start = time.monotonic()
        error = failure_of(lambda: engine.wait(engine.write(region, remote[1], 1), 20.0))
        took = time.monotonic() - start
        with engine._resources.worker.paused():
            engine._memory.set_word(S.SCHED_YIELD, usual)
        assert isinstance(error, PeerTimeout)
        assert (error.peer, error.transport) == (1, "fake")
        return took

    took, _ = on_fake(work, network, timeout_s=1.0, spin_turns=0, yield_turns=1 << 30)
    assert 1.0 <= took < 10.0


def test_a_peer_that_cannot_be_reached_holds_nobody_else_up() -> None:
    """EAGAIN for ever, as tcp gives for a peer that is gone."""
    network = FakeNetwork(3)

    def work(engine: TransferEngine, group: Group) -> str:
        region = engine.allocate(1 << 16)
        remote = registered(engine, group, region)
        group.barrier()
        said = ""
        if group.rank == 0:
            network.set(0, fake_nic.UNREACHABLE, 1 << 2)
            lost = [engine.write(region.part(0, 8), remote[2].part(0, 8), 1) for _ in range(300)]
            good = [engine.write(region.part(0, 8), remote[1].part(0, 8), 1) for _ in range(300)]
            pump(engine, lambda: all(operation.done for operation in good))
            assert not any(operation.error for operation in good)
            assert not any(operation.done for operation in lost)
            said = str(until_error(engine))
            pump_quietly(engine, lambda: all(operation.done for operation in lost))
            assert all(isinstance(operation.error, PeerTimeout) for operation in lost)
            late = engine.write(region.part(0, 8), remote[2].part(0, 8), 1)
            pump_quietly(engine, lambda: late.done)
            assert "an earlier write to it failed: nothing moved" in str(late.error)
        elif group.rank == 1:
            engine.wait_imm(1, 300)
        return said

    said = on_fake(work, network, timeout_s=1.0)
    assert said[0] == "rank 0 timed out waiting for rank 2 in write: expected 1, saw 0"


def pump_quietly(engine: TransferEngine, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        try:
            engine.progress()
        except TransportError:
            continue


@pytest.mark.parametrize(
    ("word", "value", "text", "code"),
    [
        (fake_nic.BROKEN, 107, "its completion queue failed: fake error 107", 107),
        (fake_nic.TWICE, 1, "it reported the completion of post", -3),
    ],
    ids=["broken queue", "completions that come twice"],
)
def test_a_nic_that_cannot_be_trusted_ends_the_engine(
    word: int, value: int, text: str, code: int
) -> None:
    network = FakeNetwork(2, 2)

    def work(engine: TransferEngine, group: Group) -> TransportError:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)
        group.barrier()
        if group.rank == 1:
            return failure_of(lambda: engine.wait_imm(1, 9, timeout_s=0.7, peer=0))
        network.set(0, fake_nic.SILENT, 2, nic=0)
        network.set(0, word, value, nic=1)
        operations = [engine.write(region.part(0, 8), remote[1].part(0, 8), 1) for _ in range(6)]
        error = until_error(engine)
        assert all(operation.done for operation in operations)
        assert any(operation.error is error for operation in operations)
        assert until_error(engine) is error, "it stays so"
        assert str(failure_of(engine.check)) == str(error)
        return error

    errors = on_fake(work, network)
    assert str(errors[0]).startswith("rank 0: fake1 (fake) cannot go on: " + text)
    assert (errors[0].transport, errors[0].code) == ("fake", code)
    assert isinstance(errors[1], PeerTimeout)
    assert (errors[1].peer, errors[1].expected, errors[1].phase) == (0, 9, "imm 1")


def failure_of(call: Callable[[], object]) -> TransportError:
    try:
        call()
    except TransportError as error:
        return error
    raise AssertionError("no error was raised")


def test_posts_that_are_refused_fail_by_name() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)
        group.barrier()
        if group.rank == 0:
            network.set(0, fake_nic.REFUSED, 22)
            operations = [engine.write(region, remote[1], 1) for _ in range(3)]
            text = str(until_error(engine))
            assert "a write of 4096 bytes to rank 1 by fake0 (fake) failed: fake error 22" in text
            pump_quietly(engine, lambda: all(operation.done for operation in operations))
            assert all(operation.error is not None for operation in operations)
        group.barrier()

    on_fake(work, network)


def test_a_wrong_key_and_a_place_outside_fail_at_the_target() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)[1]
        group.barrier()
        if group.rank == 0:
            forged = remote.key[:-1] + bytes([remote.key[-1] ^ 1])
            operation = engine.write(region, RemoteRegion(1, remote.address, 4096, forged), 1)
            assert "fake error 5 (10)" in str(until_error(engine))
            assert operation.error is not None
        group.barrier()
        assert engine.arrived(1) == 0

    on_fake(work, network)


def test_a_refused_registration_is_known_everywhere() -> None:
    network = FakeNetwork(3, refuse_rank=1)

    def one(group: Group) -> str:
        return raised(lambda: open_fake(group, network), TransportError)

    texts = run_threads(one, 3)
    assert texts[1] == f"fake0 (fake): cannot register {texts[1].split()[4]} bytes: told to refuse"
    for rank in (0, 2):
        assert texts[rank].startswith("rank 1 failed in register: TransportError: fake0 (fake)")


def test_an_allocation_that_one_nic_refuses_fails_everywhere_and_leaves_nothing() -> None:
    network = FakeNetwork(2)

    def work(engine: TransferEngine, group: Group) -> str:
        engine.allocate(4096)
        group.barrier()
        if group.rank == 1:
            network.refuse_rank = 1
        group.barrier()
        text = raised(lambda: engine.allocate(8192), TransportError)
        group.barrier()
        network.refuse_rank = -1
        group.barrier()
        engine.allocate(8192)
        return text

    texts = on_fake(work, network)
    assert "cannot register 8192 bytes: told to refuse" in texts[1]
    assert texts[0].startswith("rank 1 failed in allocate: TransportError: fake0 (fake): cannot")


def test_a_rank_that_never_comes_is_named() -> None:
    network = FakeNetwork(2)

    def one(group: Group) -> str:
        if group.rank == 1:
            return ""
        try:
            TransferEngine(group, network.openers(0), timeout_s=0.3)
        except MoecommError as error:
            return str(error)
        return "no error"

    assert run_threads(one, 2)[0] == (
        "rank 0 timed out waiting for rank 1 in engine: expected 2, saw 1"
    )
