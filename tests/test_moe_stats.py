"""Counters, memory, and what ``check`` reports."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, run_case
from schedules import dispatch_arguments
from threads import run_threads

import moecomm as mc
from moecomm.kernels.args import PHASES

pytestmark = pytest.mark.usefixtures("poisoned")

BASE: dict[str, Any] = {
    "num_experts": 8, "top_k": 3, "hidden": 40, "max_tokens": 9, "timeout_s": 20.0
}  # fmt: skip
CONFIGS = {
    "batched": mc.MoeConfig(**BASE),
    "sender": mc.MoeConfig(**BASE, reduce="sender", combine_dtype="float32"),
    "grouped-fp8": mc.MoeConfig(
        **BASE, layout="grouped", dispatch_dtype="float8_e4m3fn", scale_block=32
    ),
    "rank": mc.MoeConfig(**BASE, layout="rank"),
    "flags": mc.MoeConfig(**BASE, wire="flags"),
}
STEPS = 3


def destinations(case: Case, rank: int, num_ranks: int) -> np.ndarray:
    """[T, R] whether a token goes to a rank."""
    owner = {
        e: r
        for r in range(num_ranks)
        for e in mc.reference.expert_range(case.cfg.num_experts, num_ranks, r)
    }
    to_rank = np.zeros((len(case.idxs[rank]), num_ranks), bool)
    for token, experts in enumerate(case.idxs[rank]):
        to_rank[token, [owner[e] for e in experts if e >= 0]] = True
    return to_rank


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_bytes_per_peer_are_those_of_the_reference(
    name: str, num_ranks: int, replicas: int
) -> None:
    """One record per (token, rank)."""
    cfg = dataclasses.replace(CONFIGS[name], replicas=replicas)
    cases = [make_case(cfg, num_ranks, seed) for seed in range(STEPS)]
    all_stats = run_threads(_stats, num_ranks, cases)
    by_rank = cfg.layout == "rank" or cfg.reduce == "sender"
    for rank, stats in enumerate(all_stats):
        sent = sum(destinations(c, rank, num_ranks).sum(axis=0) for c in cases)
        record = record_bytes(cfg)
        assert stats.dispatch_tokens == sent.tolist()
        assert stats.dispatch_bytes == (sent * record).tolist()
        groups = range(0, num_ranks, replicas)
        came = [
            sum(int(destinations(c, g, num_ranks)[:, rank].sum()) for c in cases) for g in groups
        ]
        assert stats.recv_tokens == came
        counts = sum(c.recv[rank].counts for c in cases)
        assert stats.expert_tokens == counts.tolist()
        rows = (
            came
            if by_rank
            else [sum(rows_of(c, rank, g // replicas) for c in cases) for g in groups]
        )
        row = round_up(cfg.hidden * (4 if cfg.combine_dtype == "float32" else 2))
        row = in_lines(row) if has_lines(cfg) else row
        assert stats.combine_rows == rows
        assert stats.combine_bytes == [n * row * replicas for n in rows]


def rows_of(case: Case, rank: int, group: int) -> int:
    """Rows that ``rank`` received from ``group``: (token, expert) pairs."""
    return int((case.recv[rank].src_rank == group).sum())


def record_bytes(cfg: mc.MoeConfig) -> int:
    """Routing, row and scales, each padded to 16 bytes; without lines, routing and the rest to a
    line of memory."""
    routing = 16 + 12 * cfg.top_k
    rest = round_up(cfg.hidden * (1 if cfg.num_scales else 2)) + 4 * cfg.num_scales
    if has_lines(cfg):
        return in_lines(round_up(routing) + round_up(rest))
    return round_up(routing, 128) + round_up(rest, 128)


def has_lines(cfg: mc.MoeConfig) -> bool:
    """Only whole 16-byte rows travel so."""
    return cfg.wire != "flags" and cfg.hidden * (1 if cfg.num_scales else 2) % 16 == 0


def in_lines(nbytes: int) -> int:
    """Lines of 128 bytes carry 120."""
    return -(-nbytes // 120) * 128


def round_up(nbytes: int, step: int = 16) -> int:
    return -(-nbytes // step) * step


def _stats(group: mc.Group, cases: list[Case]) -> mc.Stats:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        nothing = comm.stats()
        assert set(nothing.dispatch_bytes + nothing.recv_tokens + nothing.expert_tokens) <= {0}
        for case in cases:
            run_case(comm, case)
        group.barrier(20)
        return comm.stats()


def test_waits_are_told_by_phase_and_peer() -> None:
    """Rank 1 is late by 0.3 s in dispatch: the others wait for it there, and for nobody else."""
    waits = run_threads(_late, 3)
    for rank in (0, 2):
        assert list(waits[rank]) == list(PHASES)
        late = waits[rank]["dispatch_recv"]
        assert late[1] > 0.25
        assert late[1] > 2 * (late[0] + late[2])
        assert waits[rank]["dispatch_send"] == [0, 0, 0]
    assert sum(waits[1]["dispatch_recv"]) < 0.25


def _late(group: mc.Group) -> dict[str, list[float]]:
    cfg = dataclasses.replace(CONFIGS["batched"], num_sms=1)
    case = make_case(cfg, 3, tokens=(2, 2, 2))
    with mc.MoeComm(cfg, group) as comm:
        if group.rank == 1:
            time.sleep(0.3)
        recv = comm.dispatch(*dispatch_arguments(case, group.rank))
        assert recv.num_rows[0] >= 0
        waits = comm.stats().wait_s
        group.barrier(20)
    return waits


# ---- memory ---------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_h07_memory_bytes_is_what_is_taken() -> None:
    """Within 5 %, and steps take no more."""
    (found,) = mc.run(_memory, 1, timeout_s=60)
    told, taken, grown = found
    assert abs(taken - told) < 0.05 * told
    assert grown < 0.01 * told


def _memory(group: mc.Group) -> tuple[int, int, int]:
    cfg = mc.MoeConfig(num_experts=8, top_k=4, hidden=2048, max_tokens=512)
    case = make_case(cfg, 1, tokens=(3,))
    with mc.MoeComm(dataclasses.replace(cfg, max_tokens=4), group) as warm:  # code, stacks
        run_case(warm, make_case(warm.config, 1, tokens=(3,)))
    base = _mapped()
    with mc.MoeComm(cfg, group) as comm:
        taken = _mapped() - base
        run_case(comm, case)
        after_one = _mapped()
        for _ in range(20):
            run_case(comm, case)
        return comm.memory_bytes, taken, _mapped() - after_one


def _mapped() -> int:
    """Bytes of this process's shared mappings: the arenas are such, heap and code are not."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        if mode.endswith("s"):
            low, high = (int(part, 16) for part in span.split("-"))
            total += high - low
    return total


# ---- check ----------------------------------------------------------------------------------


def test_check_of_a_healthy_communicator_says_nothing_and_waits_for_nobody() -> None:
    run_threads(_healthy, 2)


def _healthy(group: mc.Group) -> None:
    case = make_case(CONFIGS["batched"], 2, tokens=(4, 4))
    with mc.MoeComm(case.cfg, group) as comm:
        comm.check()
        handle = comm.dispatch_send(*dispatch_arguments(case, group.rank))
        started = time.monotonic()
        comm.check()
        assert time.monotonic() - started < 1
        comm.dispatch_recv(handle)
        comm.check()
        group.barrier(20)


def test_check_raises_a_timeout_every_time_and_an_overflow_once() -> None:
    cfg = dataclasses.replace(CONFIGS["batched"], max_recv_tokens=3, timeout_s=0.5)
    run_threads(_reports, 2, cfg)


def _reports(group: mc.Group, cfg: mc.MoeConfig) -> None:
    full = np.zeros((4, 3), np.int32)  # all to expert 0, which has room for 3
    x = np.zeros((4, 40), make_case(cfg, 1, tokens=(0,)).xs[0].dtype)
    with mc.MoeComm(cfg, group) as comm:
        for _ in range(3):  # the error ends the step, not the communicator
            handle = comm.dispatch_send(x, full)
            with pytest.raises(mc.Overflow) as caught:
                comm.dispatch_recv(handle)
            error = caught.value
            told = error.where, error.expert_or_rank, error.needed, error.capacity
            assert told == ("expert", 0, 8, 3)
            comm.check()
            with pytest.raises(mc.StateError, match="it failed"):
                comm.combine_recv(handle)
            handle.close()
        case = make_case(cfg, 2, tokens=(1, 2), skew=1.0)
        run_case(comm, case)
        group.barrier(20)
        if group.rank == 0:
            with pytest.raises(mc.PeerTimeout):
                comm.dispatch(x[:1], full[:1])
            for _ in range(2):
                with pytest.raises(mc.PeerTimeout):
                    comm.check()
        group.barrier(20)
