"""What the transfer engine costs beside C: the same calls, on the same endpoints; and what movers
take beside C that moves the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from moecomm.bench.environment import environment
from moecomm.bench.transfer_bulk import movers
from moecomm.bench.transfer_sides import Sides
from moecomm.errors import ConfigError, TransportError
from moecomm.group import Group
from moecomm.run import run
from moecomm.store_local import LocalStore
from moecomm.transport.base import RemoteRegion
from moecomm.transport.efa import open_engine
from moecomm.transport.engine import EngineOptions, TransferEngine

Record = dict[str, Any]
PARTS: Final = ("engine", "bulk")
_BYTES: Final = 1 << 20
_WINDOW: Final = 64  # writes in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What is measured.

    Args:
        fabrics: libfabric's, by their names in ``MOECOMM_FABRIC``.
        repeats: of each side, in turn; the best of each counts, the median is shown, too.
        posts: writes of 64 bytes in one repeat; the other figures take a part of it.
        peers: of the scatter.
        ranks, tokens: of the movers' exchange: processes, and tokens of each.
        parts: of the measurement: ``"engine"``, ``"bulk"``.
        spin: idle polls of either side before it gives up the processor; few where cores are
            shared.
        timeout_s: for everything.
    """

    fabrics: tuple[str, ...] = ("shm", "tcp")
    repeats: int = 9
    posts: int = 40_000
    peers: int = 15
    ranks: int = 4
    tokens: int = 128
    parts: tuple[str, ...] = PARTS
    spin: int = 2000
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"parts: {part!r} must be one of {', '.join(PARTS)}")


def run_transfer_bench(options: TransferOptions) -> dict[str, Any]:
    """``{"environment": {...}, "results": [{...}, ...]}``, plain values."""
    results: list[Record] = []
    for fabric in options.fabrics if "engine" in options.parts else ():
        results += posting(fabric, options)
        results += run(pair, 2, fabric, options, timeout_s=options.timeout_s)[0]
        results.append(scatter(fabric, options))
    for fabric in options.fabrics if "bulk" in options.parts else ():
        results += movers(
            fabric, options.ranks, options.tokens, 4 * options.repeats, options.timeout_s
        )
    machine = environment()
    machine["options"] = dataclasses.asdict(options)
    machine["load"] = os.getloadavg()
    return {"environment": machine, "results": results}


def _engine(options: TransferOptions, **changes: Any) -> EngineOptions:
    """Options of an engine that gives up the processor, but does not sleep."""
    start = {"message_bytes": 0, "spin_turns": options.spin, "yield_turns": 1 << 30}
    return EngineOptions(**{**start, **changes})


def _everybodys(engine: TransferEngine, group: Group, nbytes: int) -> list[RemoteRegion]:
    region = engine.allocate(nbytes)
    told = group.all_gather(engine.register(region).to_bytes())
    return [RemoteRegion.from_bytes(blob) for blob in told]


def pair(group: Group, fabric: str, options: TransferOptions) -> list[Record]:
    """Latency and bandwidth between two processes."""
    engine = open_engine(group, fabric, num_nics=1, options=_engine(options))
    with engine:
        src = engine.allocate(_BYTES)
        remote = _everybodys(engine, group, _BYTES)
        sides = Sides(engine, src, [remote[1 - group.rank]], options.spin)
        first = group.rank == 0
        trips, bulk = options.posts // 8, max(options.posts // 200, 20)

        def alone(side: Callable[[int, int, int], float], *what: int) -> Callable[[], float]:
            """Rank 0 writes, rank 1's loop polls."""
            return lambda: side(*what) if first else 0.0

        wide = (_BYTES, bulk, 8)
        found = [
            _compare(group, fabric, "half round trip, 8 B with immediate", "us", 5e5 / trips,
                     options.repeats, options.timeout_s,
                     lambda: sides.c_pingpong(8, trips, first, group),
                     lambda: sides.pingpong(8, trips, first)),
            _compare(group, fabric, "write, 1 MiB", "us", 1e6 / bulk,
                     options.repeats, options.timeout_s,
                     alone(sides.c_stream, *wide), alone(sides.stream, *wide)),
        ]  # fmt: skip
        group.barrier(options.timeout_s)
    return found


def _compare(
    group: Group,
    fabric: str,
    what: str,
    unit: str,
    scale: float,
    repeats: int,
    timeout_s: float,
    c_side: Callable[[], float],
    engine_side: Callable[[], float],
) -> Record:
    """Both sides in turn, so that whatever disturbs the machine disturbs both."""
    c_times: list[float] = []
    engine_times: list[float] = []
    for _ in range(repeats):
        for side, times in ((c_side, c_times), (engine_side, engine_times)):
            group.barrier(timeout_s)
            times.append(side() * scale)
    return _record(fabric, what, unit, c_times, engine_times)


def _record(fabric: str, what: str, unit: str, c: list[float], engine: list[float]) -> Record:
    return {
        "kind": "transfer",
        "fabric": fabric,
        "what": what,
        "unit": unit,
        "c": min(c),
        "engine": min(engine),
        "ratio": min(engine) / max(min(c), 1e-9),  # rank 1 has no times of its own
        "c_median": statistics.median(c),
        "engine_median": statistics.median(engine),
        "correct": True,
    }


def scatter(fabric: str, options: TransferOptions) -> Record:
    """Posting one write to each of many peers, which are threads of this process."""
    store, size = LocalStore(), options.peers + 1
    over = threading.Event()
    found: list[Record] = []
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            # The peers' workers sleep: they have to poll now and then, and no more.
            idle = {} if rank == 0 else {"spin_turns": 0, "yield_turns": 0, "sleep_us": 500}
            group = Group(rank, size, store)
            with open_engine(group, fabric, num_nics=1, options=_engine(options, **idle)) as engine:
                src = engine.allocate(4096)
                remote = _everybodys(engine, group, 4096)
                if rank == 0:
                    sides = Sides(engine, src, remote[1:], options.spin)
                    found.append(_bursts(sides, fabric, options))
                else:
                    over.wait(options.timeout_s)
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)
        finally:
            if rank == 0:
                over.set()  # also when it has failed: nobody waits for it then

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    late = _late(threads, options.timeout_s)
    if failures:
        raise failures[0]
    if late:
        raise TransportError(
            f"scatter over {fabric}: ranks {late} do not end within {options.timeout_s:g} s"
        )
    return found[0]


def _late(threads: list[threading.Thread], timeout_s: float) -> list[int]:
    """Start all; which have not ended ``timeout_s`` later."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [rank for rank, thread in enumerate(threads) if thread.is_alive()]


def _bursts(sides: Sides, fabric: str, options: TransferOptions) -> Record:
    c_times: list[float] = []
    engine_times: list[float] = []
    turn = [(c_times, sides.c_burst), (engine_times, sides.burst)]
    for _ in range(20 * options.repeats):
        for times, burst in turn:
            times.append(burst(64) * 1e6)
        # Or one side always gets the same half of the places in each peer's queue: the same calls
        # then took 0.1 us more or less than the other side's, differently in each process.
        turn.reverse()
    what = f"scatter to {options.peers} peers, 64 B, until posted"
    record = _record(fabric, what, "us", c_times, engine_times)
    # Single bursts last microseconds: the best of hundreds is luck, the best tenth is not.
    c, engine = (statistics.quantiles(times, n=10)[0] for times in (c_times, engine_times))
    return record | {"c": c, "engine": engine, "ratio": engine / c}


def posting(fabric: str, options: TransferOptions) -> list[Record]:
    """A write of 64 bytes to this very rank, from command to completion. Processor time: in C, and
    by the engine. By the clock: the engine's, alone, and while Python computes beside it, holding
    the GIL, on a processor of its own. Then how long one with an immediate takes until this rank
    has counted it and sends the next."""
    group = Group(0, 1, LocalStore())
    # When all is written the worker sleeps: it would poll until Python notices, and that counts.
    idle = {"yield_turns": 0, "sleep_us": 500} if options.spin else {}
    with open_engine(group, fabric, num_nics=1, options=_engine(options, **idle)) as engine:
        src = engine.allocate(4096)
        sides = Sides(engine, src, _everybodys(engine, group, 4096), options.spin)
        times: dict[str, list[float]] = {"c": [], "engine": [], "alone": [], "busy": []}
        hops = options.posts // 8
        c_hop: list[float] = []
        hop: list[float] = []
        for _ in range(options.repeats):
            c_hop.append(sides.c_pingpong(8, hops, True, group) * 1e9 / hops)
            hop.append(sides.pingpong(8, hops, True) * 1e9 / hops)
            before = time.thread_time()
            sides.c_stream(64, options.posts, _WINDOW)
            times["c"].append((time.thread_time() - before) * 1e9 / options.posts)
            before = engine.worker_seconds()
            took = sides.stream(64, options.posts, _WINDOW)
            times["engine"].append((engine.worker_seconds() - before) * 1e9 / options.posts)
            times["alone"].append(took * 1e9 / options.posts)
            with _computing():
                took = sides.stream(64, options.posts, _WINDOW)
            times["busy"].append(took * 1e9 / options.posts)
    beside = "engine alone, and with Python computing beside it"
    return [
        _record(fabric, "post, 64 B, processor time", "ns", times["c"], times["engine"]),
        _record(fabric, beside, "ns", times["alone"], times["busy"]),
        _record(fabric, "one way to itself, 8 B with immediate", "ns", c_hop, hop),
    ]


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """A Python thread that never waits, for as long as this lasts."""
    stop = threading.Event()
    thread = threading.Thread(target=_compute, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _compute(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for n in range(1000):
            total += n
