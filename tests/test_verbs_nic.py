"""Open RDMA ports, by themselves: connecting, posting, polling, failing. No engine around them."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from verbs_ends import SIZING, TIMEOUT_S, End, connect

from moecomm.errors import PeerTimeout, TransportError
from moecomm.store_local import LocalStore
from moecomm.transport.engine import records
from moecomm.transport.engine.provider import MAX_BURST, Sizing
from moecomm.transport.verbs import statuses
from moecomm.transport.verbs.bootstrap import Address, StoreBootstrap
from moecomm.transport.verbs.datagrams import Datagrams
from moecomm.transport.verbs.devices import choose_ports
from moecomm.transport.verbs.nic import VerbsNic

pytestmark = pytest.mark.nic
SELF, OTHER = 0, 1  # of end a


@pytest.fixture
def make_ends() -> Iterator[Callable[..., list[End]]]:
    """Makes two connected ends, closed at the end of the test."""
    nics: list[VerbsNic] = []

    def make(sizing: Sizing = SIZING, nbytes: int = 1 << 16) -> list[End]:
        port = choose_ports()[0]
        nics.extend(VerbsNic(port, sizing) for _ in range(2))
        connect(*nics)
        return [End(nic, nbytes) for nic in nics]

    yield make
    for nic in nics:
        nic.close()


@pytest.fixture
def ends(make_ends: Callable[..., list[End]]) -> list[End]:
    return make_ends()


def fill(end: End, value: int) -> None:
    ctypes.memset(end.region.address, value, end.region.nbytes)


def read(end: End, nbytes: int) -> bytes:
    return ctypes.string_at(end.region.address, nbytes)


def test_a_write_arrives_with_its_immediate(ends: list[End]) -> None:
    a, b = ends
    for nbytes in (0, 8, 64, 65, 5000):
        fill(a, nbytes % 251 + 1)
        fill(b, 0xEE)
        assert a.post(a.write(b, OTHER, context=7, nbytes=nbytes, imm=0xFEDCBA98)) == 1
        (arrived,) = b.collect(1)
        assert (arrived.kind, arrived.imm) == (records.ARRIVED, 0xFEDCBA98)
        assert read(b, nbytes + 10) == bytes([nbytes % 251 + 1]) * nbytes + b"\xee" * 10
        (sent,) = a.collect(1)
        assert (sent.kind, sent.context) == (records.SENT, 7)


def test_a_write_without_an_immediate_gives_no_event_there(ends: list[End]) -> None:
    a, b = ends
    fill(a, 1)
    a.post(a.write(b, OTHER, context=1, nbytes=100, imm=None))
    assert [e.kind for e in a.collect(1)] == [records.SENT]
    assert b.poll() == []
    assert read(b, 101) == b"\1" * 100 + b"\0"


def test_a_burst_to_several_peers_completes_each_post_once(ends: list[End]) -> None:
    a, b = ends
    order = [(n, random.Random(n).choice((SELF, OTHER))) for n in range(MAX_BURST)]
    posts = [a.write((a, b)[peer], peer, context=n, nbytes=16, imm=n) for n, peer in order]
    assert a.post(*posts) == MAX_BURST
    here = [n for n, peer in order if peer == SELF]
    there = [n for n, peer in order if peer == OTHER]
    events = a.collect(MAX_BURST + len(here))
    assert sorted(e.context for e in events if e.kind == records.SENT) == list(range(MAX_BURST))
    assert [e.imm for e in events if e.kind == records.ARRIVED] == here
    assert [e.imm for e in b.collect(len(there))] == there


def test_messages(ends: list[End]) -> None:
    a, b = ends
    for n in range(3 * SIZING.num_messages):
        data = f"message {n} ".encode() * 4
        ctypes.memmove(a.region.address, data, len(data))
        assert a.post(a.message(OTHER, context=n % SIZING.tx_depth, nbytes=len(data))) == 1
        (came,) = b.collect(1)
        assert came.kind == records.RECEIVED
        assert ctypes.string_at(came.context, came.detail) == data
        a.collect(1)


def test_arrivals_wait_until_they_are_polled(ends: list[End]) -> None:
    """As many as the engine lets be under way, messages and writes, and none is polled."""
    a, b = ends
    for n in range(SIZING.rx_depth):
        kind = a.message if n % 3 == 0 and n < 3 * SIZING.num_messages else a.signal
        a.post(kind(OTHER, context=0, nbytes=8))
        a.collect(1)
    assert len(b.collect(SIZING.rx_depth)) == SIZING.rx_depth
    assert b.nic.lost == 0
    a.post(a.signal(OTHER, context=1, nbytes=0))
    assert [e.kind for e in b.collect(1)] == [records.ARRIVED]


def test_a_full_queue_takes_what_it_can(make_ends: Callable[..., list[End]]) -> None:
    a, b = make_ends(replace(SIZING, tx_depth=4))
    assert a.nic.limits.tx_depth == 4
    assert a.nic.limits.peer_depth == 4
    posts = [a.write(b, OTHER, context=n, nbytes=8, imm=n) for n in range(MAX_BURST)]
    left, contexts, accepted = posts, [], []
    deadline = time.monotonic() + TIMEOUT_S
    while left or len(contexts) < MAX_BURST:
        count = a.post(*left) if left else 0
        accepted.append(count)
        left = left[count:]
        contexts += [e.context for e in a.poll()]
        assert time.monotonic() < deadline
    assert accepted[0] < MAX_BURST
    assert sorted(contexts) == list(range(MAX_BURST))
    assert [e.imm for e in b.collect(MAX_BURST)] == list(range(MAX_BURST))


def test_a_wrong_remote_key_is_a_failure_that_says_so(ends: list[End]) -> None:
    a, b = ends
    bad = a.write(b, OTHER, context=1, nbytes=8)
    bad.remote_key ^= 0x5500
    good = a.write(b, OTHER, context=2, nbytes=8)
    a.post(bad, good)
    events = {e.context: e for e in a.collect(2)}
    assert {e.kind for e in events.values()} == {records.FAILED}
    assert events[1].code == statuses.REM_ACCESS_ERR
    assert events[2].code == statuses.WR_FLUSH_ERR
    text = a.nic.explain(events[1].code, events[1].detail)
    assert "not registered there" in text
    assert "IBV_WC_REM_ACCESS_ERR" in text
    a.post(a.write(a, SELF, context=3, nbytes=8))  # other peers go on
    assert {e.kind for e in a.collect(2)} == {records.SENT, records.ARRIVED}


def test_memory_that_is_not_registered_here(ends: list[End]) -> None:
    a, b = ends
    post = a.write(b, OTHER, context=1, nbytes=100)
    post.local += 1 << 30
    a.post(post)
    (event,) = a.collect(1)
    assert (event.kind, event.code) == (records.FAILED, 4)
    assert "IBV_WC_LOC_PROT_ERR" in a.nic.explain(event.code, event.detail)


def test_memory_that_is_no_longer_registered_there(ends: list[End]) -> None:
    a, b = ends
    b.nic.deregister(b.registration)
    a.post(a.write(b, OTHER, context=1, nbytes=8))
    assert [e.code for e in a.collect(1)] == [statuses.REM_ACCESS_ERR]


def test_a_peer_that_is_gone(ends: list[End]) -> None:
    a, b = ends
    b.nic.close()
    a.post(a.write(b, OTHER, context=1, nbytes=8))
    (event,) = a.collect(1)
    assert (event.kind, event.code) == (records.FAILED, statuses.RETRY_EXC_ERR)
    assert "does not answer" in a.nic.explain(event.code, event.detail)


def test_a_peer_that_does_not_connect() -> None:
    port = choose_ports()[0]
    a, b = VerbsNic(port, SIZING), VerbsNic(port, SIZING)
    try:
        with pytest.raises(PeerTimeout) as caught:
            a.connect([a.address(), b.address()], 0.3)
        assert (caught.value.phase, caught.value.peer) == ("connect", 1)
    finally:
        a.close()
        b.close()


def test_datagrams_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, send = random.Random(4), Datagrams.send
    lost = []

    def lossy(self: Datagrams, *arguments: object) -> bool:
        if rng.random() < 0.7:
            lost.append(1)
            return True
        return send(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Datagrams, "send", lossy)
    port = choose_ports()[0]
    nics = [VerbsNic(port, SIZING) for _ in range(3)]
    try:
        connect(*nics)
        ends = [End(nic, 4096) for nic in nics]
        for n, end in enumerate(ends):
            for peer in range(3):
                end.post(end.signal(peer, context=peer, nbytes=0, imm=n))
        for end in ends:
            arrived = [e.imm for e in end.collect(6) if e.kind == records.ARRIVED]
            assert sorted(arrived) == [0, 1, 2]
    finally:
        for nic in nics:
            nic.close()
    assert lost


def test_over_a_store() -> None:
    port, store = choose_ports()[0], LocalStore()
    nics = [
        VerbsNic(port, SIZING, bootstrap=lambda: StoreBootstrap(store, "test")) for _ in range(2)
    ]
    try:
        connect(*nics)
        a, b = (End(nic, 4096) for nic in nics)
        a.post(a.write(b, OTHER, context=0, nbytes=8, imm=5))
        assert [e.imm for e in b.collect(1)] == [5]
    finally:
        for nic in nics:
            nic.close()


def test_connecting_twice() -> None:
    """Two connections of the same two ports do not mix, and the first goes on."""
    port = choose_ports()[0]
    nics = [VerbsNic(port, replace(SIZING, num_peers=4)) for _ in range(2)]
    try:
        connect(*nics)
        a, b = (End(nic, 4096) for nic in nics)
        a.post(a.signal(OTHER, context=0, nbytes=0, imm=1))
        connect(*nics)
        a.post(a.signal(OTHER + 2, context=1, nbytes=0, imm=2))
        a.post(a.signal(OTHER, context=2, nbytes=0, imm=3))
        assert sorted(e.imm for e in b.collect(3)) == [1, 2, 3]
    finally:
        for nic in nics:
            nic.close()


def test_peers_that_no_connection_can_reach() -> None:
    port = choose_ports()[0]
    nic = VerbsNic(port, replace(SIZING, num_peers=1))
    mine = Address.from_bytes(nic.address())
    other_family = bytes.fromhex("fe800000000000000000000000000001")
    try:
        for address, rule in (
            (b"something", "another version"),
            (replace(mine, roce=not mine.roce).to_bytes(), "MOECOMM_RDMA_PORTS"),
            (replace(mine, gid=other_family).to_bytes(), "MOECOMM_GID_INDEX"),
        ):
            with pytest.raises(TransportError, match=rule) as caught:
                nic.connect([address], 1.0)
            assert caught.value.peer == 0
            assert str(port) in str(caught.value)
        with pytest.raises(TransportError, match="1 planned"):
            nic.connect([mine.to_bytes(), mine.to_bytes()], 1.0)
    finally:
        nic.close()


def test_open_and_close_leave_nothing() -> None:
    """More often than the device has room for queues of ports that were not closed."""
    port, sizing = choose_ports()[0], replace(SIZING, num_peers=1, num_messages=0)
    for _ in range(30):
        nic = VerbsNic(port, sizing)
        nic.connect([nic.address()], 5.0)
        nic.close()
        nic.close()


def test_the_device_says_what_it_cannot_do() -> None:
    from moecomm.transport.verbs.library import VerbsError

    nic = VerbsNic(choose_ports()[0], SIZING)
    try:
        end = End(nic, 4096)
        nowhere = replace(end.region, address=16)
        with pytest.raises(VerbsError, match="ibv_reg_mr") as caught:
            nic.register(nowhere)
        assert caught.value.code
    finally:
        nic.close()
