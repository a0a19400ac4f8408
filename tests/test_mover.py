"""The mover's program, uncompiled, beside models of kernels and network: every write is the one of
docs/protocol.md, nothing is announced before it is there, and mistakes are found."""

from __future__ import annotations

import pytest
from mover_model import World, load, sources, store

from moecomm.remote_words import FREE, TICKET_BITS, Kind, RemoteWords
from moecomm.transport.proxy import state as P

WRAP = 8190  # epochs whose low bits begin anew


@pytest.mark.parametrize("first", [1, WRAP])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_order_of_kernels_movers_and_network(num_ranks: int, first: int) -> None:
    """Two slots at once, steps combined, closed and overflown, 40 schedules."""
    for seed in range(40):
        World(num_ranks, seed, first=first).run(4)


def test_arrivals_that_come_again_change_nothing() -> None:
    """At once or epochs later; a mover that counted them would wake streams too early."""
    for seed in range(10):
        World(3, seed, first=WRAP, repeats=0.3).run(4)
    program = sources("    if ld64(sent) >= epoch:\n        return\n", "")
    with pytest.raises(AssertionError):
        _run_many(program)


def _run_many(program: str) -> None:
    for seed in range(40):
        World(3, seed, first=WRAP, repeats=0.3, program=program).run(4)


MUTATIONS = {
    "plan not kept": ("            _keep_plan(state, slot)\n", "            pass\n"),
    "operation used before it is done": ("(opened >> door) & 1 or room", "room"),
    "epoch from its low bits alone": (
        "epoch = mine + ((((imm & LOW) - mine + _HALF) & LOW) - _HALF)",
        "epoch = (mine & ~LOW) | (imm & LOW)",
    ),
    "a word goes back": ("if ld64(word) < epoch:", "if ld64(word) != epoch:"),
    "rows do not acknowledge": (
        "        _raise_arrived(state, slot, source, rows, epoch)\n"
        "        _raise_arrived(state, slot, source, CHANNEL_ACK, epoch)\n",
        "        _raise_arrived(state, slot, source, rows, epoch)\n",
    ),
    "doors out of order": ("    if stage < P.RETURN:\n", "    if stage < P.RETURN - 1:\n"),
    "records from the first one": (
        "skip = 0 if kind == PRIVATE else ld64(state + P.PRIVATE)", "skip = 0",
    ),
    "private records always sent": (
        "min(count, private) if count > 0 else -1", "min(count, private)",
    ),
    "a door rung for the epoch before": (
        "ld64_acquire(word) >= epoch", "ld64_acquire(word) >= epoch - 1",
    ),
    "heads land at the source's place": (
        "target = ld64(state + P.IN_HEAD) + (pairs + me) * nbytes",
        "target = ld64(state + P.IN_HEAD) + (pairs + rank) * nbytes",
    ),
    "woken with the heads": (
        "if half == _DISPATCH and not _records_here(state, slot, source, epoch):", "if False:",
    ),
    "woken without the other records": (
        "return count <= ld64(state + P.PRIVATE) or", "return True or",
    ),
    "woken by all but one": (
        "if ld64(record + P.HALF_COUNT) == ld64(state + P.NUM_REMOTES):",
        "if ld64(record + P.HALF_COUNT) == ld64(state + P.NUM_REMOTES) - 1:",
    ),
    "woken by the epoch before": ("if ahead == 0 or ahead", "if ahead <= 1 or ahead"),
    "records announced as private": ("CHANNEL_RECORDS + 1, epoch", "CHANNEL_RECORDS, epoch"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_found(name: str) -> None:
    program = sources(*MUTATIONS[name])
    for seed in range(40):
        for first in (1, WRAP):
            try:
                World(3, seed, first=first, program=program).run(6)
            except AssertionError:
                return
    pytest.fail(f"{name}: 80 schedules without an error")


# ---- ends --------------------------------------------------------------------------------------


def _word(world: World, rank: int, name: str) -> int:
    return world.flags[rank].address + 8 * getattr(RemoteWords(world.areas, rank), name)


def _kinds(world: World, rank: int) -> list[int]:
    return [kind for kind, _, source, _ in world.posted if source == rank]


def test_an_abort_is_told_once_and_passed_on() -> None:
    """From kernels, and from a peer: to all remote peers, and no door is served any more."""
    for name in ("abort_out", "abort_in"):
        world = World(3, 0)
        store(_word(world, 0, name), -(1 << 63) | 5)
        for _ in range(3):
            world.turn(0)
        assert _kinds(world, 0) == [Kind.ABORT, Kind.ABORT]


def test_a_failed_write_blames_its_peer() -> None:
    world = World(3, 0)
    words = RemoteWords(world.areas, 0)
    store(world.flags[0].address + 8 * words.door(0, Kind.HEAD), 1)
    world.turn(0)
    engine, mover = world.engines[0], world.movers[0]
    op = engine.program_operations.start + Kind.HEAD
    engine.errors[op], engine.broken[2] = 5, 5
    world.turn(0)
    word = load(_word(world, 0, "abort_in")) & (1 << 64) - 1
    assert word == 1 << 63 | 0 << 32 | 0 << 16 | 2
    assert (mover._get(P.CULPRIT), mover._get(P.CULPRIT_CODE)) == (3, 5)
    assert _kinds(world, 0)[-2:] == [Kind.ABORT, Kind.ABORT]


def test_a_failure_to_reach_one_who_left_is_none() -> None:
    world = World(3, 0)
    words = RemoteWords(world.areas, 0)
    store(world.flags[0].address + 8 * words.door(0, Kind.HEAD), 1)
    world.turn(0)
    engine = world.engines[0]
    engine.inbox.append((Kind.LEAVE << 6) << 23 | 2 << 13)
    op = engine.program_operations.start + Kind.HEAD
    engine.errors[op], engine.broken[2] = 5, 5
    world.turn(0)
    assert load(_word(world, 0, "abort_in")) == 0
    assert Kind.ABORT not in _kinds(world, 0)


def test_an_engine_that_fails_stops_its_own_kernels() -> None:
    world = World(2, 0)
    world.engines[0].fault = -5
    world.turn(0)
    assert load(_word(world, 0, "abort_in")) & 0xFFFF == 0
    assert load(_word(world, 0, "abort_in")) != 0
    assert world.movers[0]._get(P.CULPRIT) == 1


def test_who_waits_in_silence_asks_around_and_who_does_not_is_quiet() -> None:
    world = World(3, 0)
    engine = world.engines[0]
    for _ in range(5):
        engine.now += 2_000_000_000
        world.turn(0)
    assert _kinds(world, 0) == []
    words = RemoteWords(world.areas, 0)
    store(world.flags[0].address + 8 * words.door(0, Kind.HEAD), 1)
    for _ in range(5):
        engine.now += 2_000_000_000
        world.turn(0)
    assert _kinds(world, 0).count(Kind.PING) == 2  # one to each; not again before it has gone


def test_closing_serves_what_was_rung_first() -> None:
    world = World(2, 0)
    mover, words = world.movers[0], RemoteWords(world.areas, 0)
    for door in range(3):
        store(world.flags[0].address + 8 * words.door(0, door), 1)
    mover._set(P.CLOSING, 1)
    world.turn(0)
    assert Kind.HEAD in _kinds(world, 0)
    assert Kind.LEAVE not in _kinds(world, 0)  # heads are on their way
    for _ in range(2000):
        world.deliver()
        world.turn(0)
    assert _kinds(world, 0)[-1] == Kind.LEAVE
    assert mover._get(P.CLOSED) == 1


def _landed(world: World, rank: int) -> list[int]:
    words = RemoteWords(world.areas, rank)
    at = world.flags[rank].address
    return [load(at + 8 * words.landed(s, h)) for s in range(world.areas.slots) for h in (0, 1)]


def _ask(world: World, slot: int, half: int, ticket: int, epoch: int) -> None:
    words = RemoteWords(world.areas, 0)
    at = world.flags[0].address + 8 * words.ticket(slot, half)
    store(at, ticket << TICKET_BITS | epoch)


def test_a_stream_waits_for_a_second_at_most() -> None:
    """For what does not come; and not at all for a step that pushes nothing."""
    world = World(2, 0)
    engine = world.engines[0]
    _ask(world, 0, 0, 7, 1)
    _ask(world, 1, 1, 3, 0)
    world.turn(0)
    assert _landed(world, 0) == [0, 0, 0, 3]
    engine.now += 900_000_000
    world.turn(0)
    assert _landed(world, 0) == [0, 0, 0, 3]
    engine.now += 200_000_000
    world.turn(0)
    assert _landed(world, 0) == [7, 0, 0, 3]


def test_who_owes_no_rows_wakes_by_an_acknowledgement() -> None:
    world = World(3, 0)
    _ask(world, 0, 1, 7, 1)
    for peer, kind, landed in ((1, Kind.ROWS, 0), (2, Kind.ACK, 7)):
        world.engines[0].inbox.append(kind << 29 | peer << 13 | 1)
        world.turn(0)
        assert _landed(world, 0) == [0, landed, 0, 0]


@pytest.mark.parametrize("how", ["abort_out", "abort_in", "fault", "asked"])
def test_no_stream_waits_once_it_is_over(how: str) -> None:
    """Whatever is stored there, or asked for, meanwhile."""
    world = World(2, 0)
    if how == "fault":
        world.engines[0].fault = -5
    elif how == "asked":
        world.movers[0].wake_streams()
        assert _landed(world, 0) == [FREE] * 4
    else:
        store(_word(world, 0, how), -(1 << 63) | 5)
    world.turn(0)
    assert _landed(world, 0) == [FREE] * 4
    store(world.flags[0].address + 8 * RemoteWords(world.areas, 0).landed(1, 0), 4)
    _ask(world, 0, 1, 9, 1)
    world.turn(0)
    assert _landed(world, 0) == [FREE] * 4


def test_immediates_that_no_mover_sends_are_counted() -> None:
    world = World(2, 0)
    world.engines[0].inbox += [(1 << 32) - 1, 0xFF << 13]
    world.turn(0)
    assert world.movers[0].strange == 2
