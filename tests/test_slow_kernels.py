"""Kernels that are slow at one place, as a busy GPU or link may make them, give the same results.

A copy of the kernels gets a delay before each of the statements below; which of them is slow in a
run is a number in the table that the emulator's kernels read their sizes from, so that all places
share one compile. A wait that is missing elsewhere then shows nearly always, where random schedules
find it once in hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from exchange import Case, compare_received, finish, make_case, send
from guards import check_gaps
from payload import payload

import moecomm as mc
from moecomm.emulator import simulate
from moecomm.kernels import emulated, source, stages
from moecomm.kernels.geometry import Grain

pytestmark = pytest.mark.usefixtures("poisoned", "slow_sources")

TURNS = 1500  # of one thread, which is how often the others get theirs

# name → file, the statement to come late, and the threads in which it does: mostly of one rank, for
# where all are equally late nobody is
PLACES = {
    "counts-after-their-first": (
        "routing.cuh", "st_relaxed_sys(head_words(s.peer[dest], a, a.rank) + word, value);",
        "a.rank == 0 && word > 0",
    ),
    "first-of-counts": (
        "routing.cuh", "st_relaxed_sys(head_words(s.peer[dest], a, a.rank) + word, value);",
        "a.rank == 0 && dest > 0 && word == 0",
    ),
    "record-flags": (
        "dispatch_send.cu", "st_release_sys(plan.flag[d], epoch);", "a.rank == 0",
    ),
    "flags-of-lines": (
        "line.cuh", "if (live && holds_flag()) st_release_sys(words + 1, v.high);",
        "lane_id() == 15",
    ),
    "acknowledgements": (
        "protocol.cuh", "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch);",
        "a.rank == 0 && r > 0",
    ),
    "all-blocks-but-one-at-a-cap": (
        "placement.cuh", "if (CAPPED && overflows(a, s, epoch)) return false;", "blockIdx.x > 0",
    ),
    "block-0-at-its-counts": (
        "placement.cuh", "if (blockIdx.x == 0) write_counts(a, s);", "blockIdx.x == 0",
    ),
    "rows-that-come-back": (
        "combine_send.cu",
        "st_release_sys(combine_flag(base, a, rec.token, rec.place[i / REPLICAS]), epoch);",
        "a.rank == 0",
    ),
    "planning-a-token": (
        "dispatch_send.cu",
        "if (plans) plan_token(a, t, load_slot(a, t), s.plans[n]);",
        "a.rank == 0",
    ),
}  # fmt: skip
CHOICE = len(stages.emulator_table(mc.Layout(mc.MoeConfig(
    num_experts=1, top_k=1, hidden=1, max_tokens=1), 1, 0), Grain(False, 1)))  # fmt: skip
chosen = {"place": -1}  # the place that is slow now


def with_delays(name: str, text: str) -> str:
    for number, (file, right, threads) in enumerate(PLACES.values()):
        if file == name:
            assert text.count(right) == 1, f"{file} has changed; state the place anew: {right}"
            slow = (
                f"{{ if (emu::config()[{CHOICE}] == {number} && ({threads}))"
                f" for (u32 turn = 0; turn < {TURNS}; ++turn) ld_relaxed_sys(emu_slow_word());"
                f" {right} }}"
            )
            text = text.replace(right, slow)
    if name == "common.cuh":
        text += "\nDEVICE const u64* emu_slow_word() { static u64 word; return &word; }\n"
    return text


@pytest.fixture(scope="module")
def slow_sources() -> Iterator[None]:
    plain_load, plain_table = source.load, stages.emulator_table
    emulated._program.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "load", lambda name: with_delays(name, plain_load(name)))
        patch.setattr(
            emulated, "emulator_table", lambda *args: [*plain_table(*args), chosen["place"]]
        )
        yield
    emulated._program.cache_clear()


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 5, "top_k": 2, "hidden": 16, "max_tokens": 4, "timeout_s": 60.0}
    return mc.MoeConfig(**{**base, **fields})


CONFIGS = {
    "batched": (config(in_flight=1), 2),
    "grouped-sender": (config(layout="grouped", expert_alignment=4, reduce="sender"), 3),
    "rank-capped": (config(num_experts=2, top_k=1, layout="rank", max_recv_tokens=4), 2),
    "batched-capped": (config(num_experts=2, top_k=1, max_recv_tokens=4, in_flight=1), 2),
    "replicas": (config(replicas=2), 4),
}


@pytest.mark.parametrize("wire", ["flags", "lines"])
@pytest.mark.parametrize("place", PLACES)
def test_a_slow_place_changes_nothing(
    place: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chosen, "place", list(PLACES).index(place))
    for cfg, num_ranks in CONFIGS.values():
        cfg = mc.MoeConfig(**{**_fields(cfg), "wire": wire})
        fits = [make_case(cfg, num_ranks, seed, idxs=_spread(cfg, num_ranks)) for seed in range(2)]
        for seed in range(3 if cfg.max_recv_tokens is None else 6):
            simulate(_steps, num_ranks, cfg, fits, seed=seed, checks=False)


def _fields(cfg: mc.MoeConfig) -> dict[str, Any]:
    return {name: getattr(cfg, name) for name in cfg.__slots__}


def _spread(cfg: mc.MoeConfig, num_ranks: int) -> list[np.ndarray[Any, Any]]:
    """Four tokens from each group, to all experts in turn: caps are just enough."""
    groups = num_ranks // cfg.replicas
    first = np.arange(4)[:, None] + np.arange(cfg.top_k)
    return [((first + g) % cfg.num_experts).astype(np.int32) for g in range(groups)]


def _steps(group: mc.Group, cfg: mc.MoeConfig, fits: list[Case]) -> None:
    """Steps that fit and, with a cap, steps that do not take turns."""
    x = payload(np.arange(4), cfg.hidden)
    all_to_one = np.full((4, cfg.top_k), -1, np.int32)
    all_to_one[:, 0] = cfg.num_experts - 1
    with mc.MoeComm(cfg, group) as comm:
        for step in range(4):
            case = fits[step % 2]
            if cfg.max_recv_tokens is not None:
                handle = comm.dispatch_send(x, all_to_one)
                with pytest.raises(mc.Overflow):
                    comm.dispatch_recv(handle)
            recv = comm.dispatch_recv(send(comm, case))
            compare_received(case, group.rank, recv)
            finish(comm, case, recv)
        check_gaps(comm)
        group.barrier(60)
