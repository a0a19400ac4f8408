"""``bench-transfer``: C and the engine share an endpoint; neither may take what is the other's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engines import options

from moecomm.bench.transfer import TransferOptions, run_transfer_bench
from moecomm.bench.transfer_sides import Sides
from moecomm.errors import ConfigError, TransportError
from moecomm.group import Group
from moecomm.run import run
from moecomm.store_local import LocalStore
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.efa import open_engine
from moecomm.transport.engine import TransferEngine

TRIPS = 20
MIB = 1 << 20


def sides_of(engine: TransferEngine, src: Region, target: RemoteRegion, patience_s: float) -> Sides:
    return Sides(engine, src, [target], 0, patience_s)


def second_comes_late(group: Group) -> tuple[float, float, int]:
    """Seconds of round trips by C, and then by the engine; how many of C's writes this counted."""
    with open_engine(group, "shm", num_nics=1, options=options()) as engine:
        src = engine.allocate(4096)
        targets = engine.exchange(engine.allocate(4096))
        sides = sides_of(engine, src, targets[1 - group.rank], 5.0)
        group.barrier()
        if group.rank == 1:
            time.sleep(0.3)
        took = sides.c_pingpong(8, TRIPS, group.rank == 0, group)
        group.barrier()
        again = sides.pingpong(8, TRIPS, group.rank == 0)
        group.barrier()
        return took, again, engine.arrived(7)


def test_a_rank_that_comes_late_loses_no_arrival() -> None:
    """Its loop still polls when the other is ready: it took C's first write, and C waited."""
    for took, again, stolen in run(second_comes_late, 2, timeout_s=60.0):
        assert took > 0
        assert again > 0
        assert stolen == 0


@pytest.fixture(params=["shm", "tcp"])
def engine(request: pytest.FixtureRequest) -> Iterator[TransferEngine]:
    group = Group(0, 1, LocalStore())
    with open_engine(group, request.param, num_nics=1, options=options()) as opened:
        yield opened


def test_c_waits_for_what_the_engine_has_under_way(engine: TransferEngine) -> None:
    src = engine.allocate(MIB)
    (target,) = engine.exchange(engine.allocate(MIB))
    sides = sides_of(engine, src, target, 10.0)
    for _ in range(10):
        writes = [engine.write(src, target, None) for _ in range(16)]
        assert sides.c_stream(64, 100, 8) > 0
        for write in writes:
            engine.wait(write, 10.0)


def test_waits_of_both_sides_end_and_say_what_for(engine: TransferEngine) -> None:
    """Nobody sends the second rank's first arrival."""
    src = engine.allocate(4096)
    (target,) = engine.exchange(engine.allocate(4096))
    sides = sides_of(engine, src, target, 0.25)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"20 round trips by C: nothing completed for 0.25 s; "
                       r"0 writes done, 0 arrivals"):  # fmt: skip
        sides.c_pingpong(8, TRIPS, False, Group(0, 1, LocalStore()))
    with pytest.raises(TransportError, match=r"program: not done in 1 s; 20 left to do"):
        sides.pingpong(8, TRIPS, False)
    assert time.monotonic() - start < 10.0
    assert sides.pingpong(8, TRIPS, True) > 0  # the engine is as good as before


def test_every_figure_is_measured() -> None:
    small = TransferOptions(
        fabrics=("shm",), repeats=2, posts=800, peers=3, ranks=2, tokens=8, spin=0, timeout_s=120.0
    )
    results = run_transfer_bench(small)["results"]
    assert len({record["what"] for record in results}) == len(results) == 8
    for record in results:
        assert record["c"] > 0
        assert record["engine" if record["kind"] == "transfer" else "mover"] > 0


def test_parts_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"parts: 'all' must be one of engine, bulk"):
        TransferOptions(parts=("all",))
