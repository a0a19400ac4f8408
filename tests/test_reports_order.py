"""Skew, sweeps, threads and several communicators in one process; see docs/reports.md, rows C."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, run_case
from payload import assert_same_bits, payload
from schedules import for_rank, random_schedule, walk
from threads import run_threads

import moecomm as mc

pytestmark = pytest.mark.usefixtures("poisoned")


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 4, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


# ---- C06 ------------------------------------------------------------------------------------


def test_c06_two_threads_with_a_group_each() -> None:
    """In both processes; a wait that held the interpreter would stop the other thread, too."""
    mc.run(_two_threads, 2, timeout_s=60)


def _two_threads(group: mc.Group) -> None:
    cases = [make_case(config(), 2, seed) for seed in range(5)]
    groups = [group.child(), group.child()]

    def rounds(own: mc.Group) -> None:
        with mc.MoeComm(cases[0].cfg, own) as comm:
            for step in range(1000):
                run_case(comm, cases[step % len(cases)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rounds, groups))


def test_c06_python_goes_on_while_a_rank_waits() -> None:
    assert run_threads(_waits, 2)[0] > 1000


def _waits(group: mc.Group) -> int:
    case = make_case(config(), 2, tokens=(4, 4))
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0)

    with mc.MoeComm(case.cfg, group) as comm:
        if group.rank == 1:
            time.sleep(0.5)
            run_case(comm, case)
        else:
            counter = threading.Thread(target=count)
            counter.start()
            run_case(comm, case)
            done.set()
            counter.join()
        group.barrier(20)
    return counted


# ---- C07 ------------------------------------------------------------------------------------


def test_c07_every_size_up_and_down_again() -> None:
    """One communicator, T = 1, 2, 4, ... 8192 and back; 131072 is for a GPU."""
    run_threads(_sweep, 2)


def sizes() -> Iterator[int]:
    for power in [*range(14), *reversed(range(14))]:
        yield 2**power


def _sweep(group: mc.Group) -> None:
    cfg = config(max_tokens=8192, hidden=4, top_k=1, combine_dtype="float32", layout="grouped")
    with mc.MoeComm(cfg, group) as comm:
        for step, tokens in enumerate(sizes()):
            ids = group.rank * 8192 + np.arange(tokens)
            idx = ((ids[:, None] * 7 + step) % 4).astype(np.int32)
            recv = comm.dispatch(payload(ids, 4), idx)
            rows = int(recv.num_rows[0])
            assert rows == recv.counts.sum()
            source = 8192 * recv.src_rank[:rows] + recv.src_token[:rows]
            assert_same_bits(recv.x[:rows], payload(source, 4), f"x of {tokens}")
            y = np.zeros(comm.layout.recv_shape, np.float32)
            y[:rows] = recv.x[:rows].astype(np.float32) + comm.expert_range(group.rank).start
            out = comm.combine(y, recv.handle, np.full((tokens, 1), 2, np.float32))
            first = np.where(idx < 2, 0, 2)
            expected = 2 * (payload(ids, 4, "float32") + first)
            assert_same_bits(out, expected.astype(np.float32), f"out of {tokens}")
        group.barrier(60)


# ---- C13, D14 -------------------------------------------------------------------------------


def test_c13_several_communicators_made_and_used_with_skew() -> None:
    """Four groups in every process, random sleeps at creation and before every call."""
    mc.run(_several, 3, timeout_s=60)


def _several(group: mc.Group) -> None:
    own = np.random.default_rng(group.rank)
    layouts = ("batched", "grouped", "rank", "batched")

    def pause() -> None:
        if own.random() < 0.3:
            time.sleep(own.exponential(0.002))

    comms = []
    for layout in layouts:
        time.sleep(own.exponential(0.02))
        comms.append(mc.MoeComm(config(layout=layout, num_experts=5), group.child()))
    for step in range(5):
        for comm in comms:
            cases = [make_case(comm.config, 3, 10 * step + i) for i in range(3)]
            schedule = random_schedule(np.random.default_rng(step), 3, 2)
            walk(comm, cases, for_rank(schedule, own), pause=pause)
    for comm in comms:
        time.sleep(own.exponential(0.02))
        comm.close()


def test_d14_two_instances_in_opposite_order() -> None:
    """Same geometry, same group; each rank opens, receives and combines the other one first."""
    run_threads(_opposite, 2)
    mc.run(_opposite, 2, timeout_s=60)


def _opposite(group: mc.Group) -> None:
    cfg = config()
    with mc.MoeComm(cfg, group) as one, mc.MoeComm(cfg, group) as two:
        for seed in range(10):
            pairs: list[tuple[mc.MoeComm, Case]] = [
                (one, make_case(cfg, 2, seed)),
                (two, make_case(cfg, 2, seed + 100)),
            ]
            if group.rank == 1:
                pairs.reverse()
            _interleave(pairs, group.rank)
        group.barrier(20)


def _interleave(pairs: list[tuple[mc.MoeComm, Case]], rank: int) -> None:
    """Half by half, so that nobody waits for what the other rank does only afterwards."""
    handles = [
        comm.dispatch_send(case.xs[rank], case.idxs[rank], case.weights[rank])
        for comm, case in pairs
    ]
    for (comm, case), handle in zip(pairs, handles, strict=True):
        recv = comm.dispatch_recv(handle)
        assert recv.counts.tolist() == case.recv[rank].counts.tolist()
    for (comm, case), handle in zip(pairs, handles, strict=True):
        comm.combine_send(case.ys[rank], handle)
    for (comm, case), handle in zip(pairs, handles, strict=True):
        assert_same_bits(comm.combine_recv(handle), case.outs[rank], "out")
