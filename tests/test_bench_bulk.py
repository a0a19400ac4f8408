"""``bench-transfer``'s movers beside C: what they move is what a step has, and is looked at."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from engines import options

from moecomm.bench.transfer_bulk import movers, one_rank, opened
from moecomm.bench.transfer_exchange import Exchange
from moecomm.bench.transfer_problem import Bytes, Problem
from moecomm.errors import TransportError
from moecomm.group import Group
from moecomm.remote_words import Door, Move
from moecomm.run import run
from moecomm.store_local import LocalStore
from moecomm.transport.efa import open_engine

RECORD = 128 + 7168 + 256  # meta; a row in fp8; its 56 scales, up to a line
ROW = 2 * 7168


def test_records_and_rows_of_a_routing() -> None:
    """Nearly every token of 8 experts in 256 has one on each of 4 ranks."""
    problem = Problem(4, 128, 10.0)
    assert problem.counts.shape == (4, 4)
    assert 100 < problem.counts.min() < problem.counts.max() <= 128
    assert problem.counts.mean() == pytest.approx(128 * (1 - 0.0965), rel=0.02)
    to, back = (problem.bytes_of(1, 2, door) for door in (Door.RECORDS, Door.ROWS))
    assert (to, back) == (problem.counts[1, 2] * RECORD, problem.counts[2, 1] * ROW)


@pytest.mark.parametrize("tokens", [20, 50])
def test_movers_carry_all_of_it(tokens: int) -> None:
    """With so many tokens records are private alone, or not."""
    counts = Problem(3, tokens, 10.0).counts
    records = int(counts.sum() - counts.trace())
    dispatch, combine = movers("tcp", 3, tokens, 2, 60.0)
    kinds = 2 if tokens == 20 else 3
    assert (dispatch["what"], dispatch["writes"]) == ("bulk dispatch", 6 * kinds)
    assert (combine["what"], combine["writes"]) == ("bulk combine", 6)
    assert 0 < dispatch["bytes"] - records * RECORD < 6 * 1024  # heads
    assert combine["bytes"] == records * ROW
    for record in (dispatch, combine):
        assert record["share"] == record["c"] / record["mover"]
        assert min(record["c_best"], record["mover_best"], record["pair_gb_s"]) > 0


def one_is_wrong(group: Group, problem: Problem, where: str) -> list[str]:
    """What checks say on this rank: before, after each side, and after both with a word changed."""
    said: list[str] = []
    with opened(group, "shm", problem) as rank:

        def look(*doors: Door) -> None:
            try:
                rank.bytes.check(doors)
                said.append("")
            except TransportError as error:
                said.append(str(error))
            rank.bytes.poison()

        look(Door[where])
        for side in (rank.by_c, rank.by_mover):
            rank.step(side)
            look(Door.RECORDS, Door.ROWS)
        group.barrier(20)  # before that, what is changed may still be on its way
        if group.rank == 1:
            move = rank.bytes.whole(Door[where], 0)
            rank.bytes.at(move.src, move.nbytes)[-1] ^= np.int64(1) << 62
        for side in (rank.by_c, rank.by_mover):
            rank.step(side)
            look(Door.RECORDS, Door.ROWS)
    return said


@pytest.mark.parametrize("where", ["RECORDS", "ROWS"])
def test_what_is_missing_or_wrong_is_noticed(where: str) -> None:
    first, second = run(one_is_wrong, 2, Problem(2, 40, 20.0), where, timeout_s=60.0)
    expected = rf"rank 0: {where.lower()} of rank 1: word \d+ of \d+ is 0x.*; 1 are wrong"
    assert "is 0x5a5a5a5a5a5a5a5a, not" in first[0]
    assert "is 0x5a5a5a5a5a5a5a5a, not" in second[0]
    assert first[1:3] == ["", ""]
    assert second[1:] == [""] * 4
    for said in first[3:]:
        assert re.search(expected, said), said


def measured_with_a_wrong_word(group: Group, problem: Problem, where: str) -> None:
    """Rank 1 packs a word of what it has for rank 0 wrongly."""
    prepare = Bytes.prepare

    def wrong(mine: Bytes) -> None:
        prepare(mine)
        if mine.rank == 1:
            move = mine.whole(Door[where], 0)
            mine.at(move.src, move.nbytes)[0] += 1

    Bytes.prepare = wrong  # type: ignore[method-assign]  # this process ends with it
    one_rank(group, "shm", problem, 1)


@pytest.mark.parametrize("where", ["HEAD", "RECORDS", "ROWS"])
def test_nothing_is_timed_that_is_wrong(where: str) -> None:
    with pytest.raises(TransportError, match=rf"rank 0: {where.lower()} of rank 1: word 0 of"):
        run(measured_with_a_wrong_word, 2, Problem(2, 8, 20.0), where, timeout_s=60.0)


def test_an_exchange_that_lacks_an_arrival_ends() -> None:
    group = Group(0, 1, LocalStore())
    with open_engine(group, "shm", num_nics=1, options=options()) as engine:
        region = engine.allocate(4096)
        (target,) = engine.exchange(region)
        moves = [(target, Move(0, 1024, 512)), (target, Move(512, 2048, 512))]
        for expected in (2, 3):
            exchange = Exchange(engine, region, moves, expected, 0, patience_s=0.25)
            exchange.reset()
            engine.set_program(*exchange.program, takes_arrivals=True)
            exchange.start(time.monotonic_ns())
            deadline = time.monotonic() + 10
            while not exchange.is_over():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            engine.set_program(0)
            if expected == 2:
                begun, end = exchange.span()
                assert begun <= end
        with pytest.raises(TransportError, match=r"nothing completed for 0.25 s; 2 of 2 writes "
                           r"done, 2 of 3 arrivals"):  # fmt: skip
            exchange.span()
