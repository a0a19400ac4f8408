"""The connection handshake without a network: a channel that loses, doubles and delays."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from moecomm.transport.verbs.handshake import (
    FIRST_INTERVAL_S,
    HELLO_BYTES,
    LONGEST_INTERVAL_S,
    Card,
    Handshake,
    Hello,
    Name,
    State,
)


def card(number: int) -> Card:
    return Card(
        write_qp=number,
        write_psn=number + 1,
        message_qp=number + 2,
        message_psn=number + 3,
        mtu=5,
        lid=7,
        gid=bytes([number % 256] * 16),
        ready_address=(1 << 63) + number,
        ready_key=number,
    )


A, B = b"AAAAAAAA", b"BBBBBBBB"


class End:
    """One end with its software: it leaves once it is confirmed, and answers no more."""

    def __init__(self, mine: bytes, theirs: bytes, now: float) -> None:
        self.handshake = Handshake(Name(mine, theirs), card(mine[0]), now)
        self.connected_to: Card | None = None
        self.left = False

    def step(self, now: float) -> Hello | None:
        """What the bootstrap does again and again; may return a datagram to send."""
        if self.left:
            return None
        handshake = self.handshake
        if handshake.needs_connecting:
            self.connected_to = handshake.peer_card
            handshake.connected(now)
        return handshake.due(now)


def play(seed: int, loss: float, ends: tuple[End, End]) -> tuple[float, int]:
    """Until both ends have left; the time and the number of datagrams. Words between confirmed
    ends always arrive, late: the connection is reliable."""
    rng, order = random.Random(seed), itertools.count()
    flying: list[tuple[float, int, int, bytes | None]] = []  # due, order, to, datagram (None: word)
    now, sent = 0.0, 0
    starts = [0.0, rng.uniform(0, 0.5)]  # one end may come later: what came before is lost
    while not all(end.left for end in ends):
        now += 0.001
        assert now < 30, "the handshake does not end"
        while flying and flying[0][0] <= now:
            _, _, to, data = heapq.heappop(flying)
            if now < starts[to] or ends[to].left:
                continue
            if data is None:
                ends[to].handshake.ready()
                continue
            hello = Hello.from_bytes(data)
            assert hello is not None
            ends[to].handshake.receive(hello, now)
        for n, end in enumerate(ends):
            if now < starts[n] or end.left:
                continue
            hello = end.step(now)
            if hello is not None:
                sent += 1
                for _ in range(1 + (rng.random() < 0.1)):
                    if rng.random() >= loss:
                        due = now + rng.uniform(0, 0.05)
                        heapq.heappush(flying, (due, next(order), 1 - n, hello.to_bytes()))
            if end.handshake.confirmed:
                end.left = True
                assert ends[1 - n].connected_to is not None, "confirmed before the peer can receive"
                heapq.heappush(flying, (now + rng.uniform(0, 0.1), next(order), 1 - n, None))
    return now, sent


def play_many(loss: float) -> None:
    for seed in range(60):
        play(seed, loss, (End(A, B, 0.0), End(B, A, 0.0)))


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.8])
def test_both_ends_get_there(loss: float) -> None:
    for seed in range(60):
        ends = End(A, B, 0.0), End(B, A, 0.0)
        play(seed, loss, ends)
        assert ends[0].connected_to == card(B[0])
        assert ends[1].connected_to == card(A[0])


def test_it_is_quick_and_quiet_where_nothing_is_lost() -> None:
    for seed in range(20):
        ends = End(A, B, 0.0), End(B, A, 0.0)
        seconds, sent = play(seed, 0.0, ends)
        assert seconds < 1.0
        assert sent < 25


def test_without_the_word_the_last_hello_could_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the word in memory is for: without it, some run never ends."""
    monkeypatch.setattr(Handshake, "ready", lambda self: None)
    with pytest.raises(AssertionError, match="does not end"):
        play_many(0.5)


def _heard_too_early(self: Handshake, now: float) -> Hello | None:
    hello = _due(self, now)
    return hello and Hello(hello.name, hello.card, heard=self.peer_card is not None)


_due: Callable[[Handshake, float], Hello | None] = Handshake.due


def test_heard_before_the_queues_are_connected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that ``heard`` guards against: saying it when the card came, not when the queue
    pairs can receive."""
    monkeypatch.setattr(Handshake, "due", _heard_too_early)
    monkeypatch.setattr(End, "step", _step_slowly)
    with pytest.raises(AssertionError, match="before the peer can receive"):
        play_many(0.3)


def _step_slowly(self: End, now: float) -> Hello | None:
    """Connecting takes a while, and what is due goes out meanwhile."""
    handshake = self.handshake
    if handshake.needs_connecting and now > 0.8:
        self.connected_to = handshake.peer_card
        handshake.connected(now)
    return handshake.due(now)


def test_states() -> None:
    end = Handshake(Name(A, B), card(1), 0.0)
    assert end.state is State.WAITING
    assert not end.needs_connecting
    end.ready()  # a word from nowhere
    assert end.state is State.WAITING
    with pytest.raises(ValueError, match="WAITING"):
        end.connected(0.0)
    end.receive(Hello(Name(B, A), card(2), heard=False), 1.0)
    assert (end.state, end.peer_card) == (State.HEARD, card(2))
    end.receive(Hello(Name(B, A), card(3), heard=False), 1.0)  # the first card holds
    assert end.peer_card == card(2)
    end.connected(1.0)
    assert end.state is State.CONNECTED
    end.receive(Hello(Name(B, A), card(2), heard=True), 1.0)
    assert end.confirmed


def test_heard_counts_though_it_came_first() -> None:
    """The peer had our hello before we had one of its."""
    end = Handshake(Name(A, B), card(1), 0.0)
    end.receive(Hello(Name(B, A), card(2), heard=True), 0.0)
    assert end.needs_connecting
    end.connected(0.0)
    assert end.confirmed


def test_it_repeats_less_and_less_often_and_answers_at_once() -> None:
    end, now, times = Handshake(Name(A, B), card(1), 0.0), 0.0, []
    while now < 3.0:
        if end.due(now) is not None:
            times.append(now)
        now += 0.001
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(FIRST_INTERVAL_S, abs=0.0015)
    assert gaps[-1] == pytest.approx(LONGEST_INTERVAL_S, abs=0.0015)
    assert all(b >= a - 0.0015 for a, b in itertools.pairwise(gaps))
    end.receive(Hello(Name(B, A), card(2), heard=False), now)
    assert end.wait_s(now) == 0.0
    assert end.due(now) is not None


def test_a_confirmed_end_answers_a_peer_that_still_asks() -> None:
    end = Handshake(Name(A, B), card(1), 0.0)
    end.receive(Hello(Name(B, A), card(2), heard=True), 0.0)
    end.connected(0.0)
    hello = end.due(0.0)
    assert hello is not None
    assert hello.heard
    assert end.due(100.0) is None
    end.receive(Hello(Name(B, A), card(2), heard=False), 100.0)
    assert end.due(100.0) is not None


def test_strangers() -> None:
    hello = Hello(Name(B, A), card(2), heard=True)
    data = hello.to_bytes()
    assert len(data) == HELLO_BYTES
    assert Hello.from_bytes(data) == hello
    for bad in (b"", data[:-1], data + b"x", b"moe2" + data[4:]):
        assert Hello.from_bytes(bad) is None
    end = Handshake(Name(A, B), card(1), 0.0)
    for name in (Name(B, B), Name(A, B), Name(B, A, 1)):  # an earlier job's, our own, another one's
        with pytest.raises(ValueError, match="a hello for"):
            end.receive(Hello(name, card(2), heard=True), 0.0)
    assert end.state is State.WAITING
