"""Would the tests notice? One fault at a time goes into the kernels, and must be found.

Each fault is one line that a tired author could get wrong. The simulation runs the faulty kernels
over at most 40 seeds, with its checks on; the right kernels pass all 40.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import pytest
from codec_examples import Int8PerToken
from exchange import Case, compare_received, finish, make_case, send

import moecomm as mc
from moecomm import layout
from moecomm.emulator import simulate
from moecomm.kernels import source

SEEDS = 40
# One slot: every step reuses the memory of the one before. A row is more chunks than a warp has
# lanes, a block gets more than one token, and there is little else.
CFG = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=592, max_tokens=15, layout="grouped", in_flight=1, timeout_s=1.0
)
STEPS = 3


SETTINGS = ["busy", "divided", "sender", "sparse", "replicas", "uncombined", "codec"]


@dataclass(frozen=True)
class Mutation:
    """In file ``name``, the one place that reads ``right`` becomes ``wrong``."""

    name: str
    right: str
    wrong: str
    wire: str = "flags"
    setting: str = "busy"


MUTATIONS = {
    "count-published-before-it-is-complete": Mutation(
        "routing.cuh",
        "    if (!may_send(a, state, epoch)) return false;\n    if (REMOTE) plan_heads",
        "    if (REMOTE) plan_heads",
    ),
    "record-flag-not-released": Mutation(
        "dispatch_send.cu",
        "st_release_sys(plan.flag[lane_id()], epoch)",
        "st_relaxed_sys(plan.flag[lane_id()], epoch)",
    ),
    "flag-before-its-data": Mutation(
        "dispatch_send.cu",
        "make_row(a, t, 0, 1, records);\n",
        "if (lane_id() < plan.num_dest) st_release_sys(plan.flag[lane_id()], epoch);\n"
        "    make_row(a, t, 0, 1, records);\n",
    ),
    "no-barrier-before-the-record-flag": Mutation(
        "dispatch_send.cu",
        "__syncwarp();  // every lane's part of the records comes before their flags",
        "",
    ),
    "no-barrier-after-the-plan": Mutation(
        "dispatch_send.cu",
        "        if (!may_send(a, state, epoch)) return;\n",
        "",
    ),
    "counters-changed-while-others-read-them": Mutation(
        "dispatch_send.cu",
        "__syncthreads();  // nobody still reads counters or others' plans",
        "",
    ),
    "chunk-published-before-its-numbers": Mutation(
        "counting.cuh",
        "__syncthreads();  // every thread's numbers come before the flag",
        "",
        setting="divided",
    ),
    "chunk-not-waited-for": Mutation(
        "counting.cuh",
        "ok = wait_flag(a, chunk_flag(a, chunk), epoch,",
        "ok = wait_flag(a, chunk_flag(a, chunk), epoch - 1,",
        setting="divided",
    ),
    "reuse-before-acknowledgement": Mutation(
        "routing.cuh",
        "state.abort == 0 && state.ack >= state.read",
        "state.abort == 0",
        setting="sparse",
    ),
    "acknowledgement-of-the-wrong-epoch": Mutation(
        "protocol.cuh",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch + 1)",
        setting="sparse",
    ),
    "acknowledgement-not-released": Mutation(
        "protocol.cuh",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
        "st_relaxed_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
        setting="uncombined",
    ),
    "acknowledged-before-the-records-are-read": Mutation(
        "dispatch_recv.cu",
        "    DYNAMIC_SHARED(RowPlan, plans);",
        "    acknowledge(a, epoch);\n    DYNAMIC_SHARED(RowPlan, plans);",
        setting="sparse",
    ),
    "head-not-released": Mutation(
        "routing.cuh",
        "if (blockIdx.x == 0 && warp_id() == num_warps() - 1) __threadfence_system();",
        "",
        setting="replicas",
    ),
    "wait-without-acquire": Mutation(
        "waits.cuh",
        "        if (pending) word = ld_acquire_sys(flag);",
        "        if (pending) word = ld_relaxed_sys(flag);",
    ),
    "stale-epoch-accepted": Mutation(
        "dispatch_recv.cu",
        "wait_any(a, flag, missing >> lane_id() & 1, epoch,",
        "wait_any(a, flag, missing >> lane_id() & 1, epoch - 1,",
    ),
    "record-flag-acquired-by-one-lane-only": Mutation(
        "dispatch_recv.cu", "__syncwarp();  // what one lane acquired holds for all", ""
    ),
    "rows-placed-without-a-barrier": Mutation(
        "dispatch_recv.cu",
        "group, true, plan);\n    __syncwarp();",
        "group, true, plan);",
    ),
    "one-block-copies-before-the-heads": Mutation(
        "placement.cuh", "if (!heads_arrived(a, s, epoch)) return false;", ""
    ),
    "combine-flag-not-released": Mutation(
        "combine_send.cu", "st_release_sys(combine_flag(", "st_relaxed_sys(combine_flag("
    ),
    "no-barrier-before-the-combine-flag": Mutation(
        "combine_send.cu",
        "__syncwarp();  // every lane's part of a row comes before its flag",
        "",
        setting="sender",
    ),
    "combine-stale-epoch-accepted": Mutation(
        "combine_recv.cu",
        "wait_any(a, flag, missing >> lane_id() & 1, epoch, who)",
        "wait_any(a, flag, missing >> lane_id() & 1, epoch - 1, who)",
    ),
    "combine-waits-for-all-but-one-row": Mutation(
        "combine_recv.cu",
        "u32 missing = __ballot_sync(FULL_WARP, lane_id() < owed.num);",
        "u32 missing = __ballot_sync(FULL_WARP, lane_id() + 1 < owed.num);",
    ),
    "flag-acquired-by-one-lane-only": Mutation(
        "combine_recv.cu", "__syncwarp();  // what one lane acquired holds for all", ""
    ),
    "token-overwritten-while-it-is-read": Mutation(
        "combine_recv.cu", "__syncwarp();  // nobody still reads this warp's space", ""
    ),
    "lines-sent-before-the-image-is-made": Mutation(
        "dispatch_send_lines.cu",
        "__syncthreads();  // every thread's part of the image comes before it is sent",
        "",
        wire="lines",
    ),
    "image-overwritten-while-it-is-sent": Mutation(
        "dispatch_send_lines.cu",
        "__syncthreads();  // nobody still reads plan and image",
        "",
        wire="lines",
    ),
    "lines-reused-before-acknowledgement": Mutation(
        "routing.cuh",
        "state.abort == 0 && state.ack >= state.read",
        "state.abort == 0",
        wire="lines",
        setting="sparse",
    ),
    "lines-of-any-epoch-accepted": Mutation(
        "line.cuh",
        "ld_acquire_sys(words + 1) == flag",
        "ld_acquire_sys(words + 1) != 0",
        wire="lines",
    ),
    "line-with-the-wrong-epoch": Mutation(
        "combine_send_lines.cu",
        "to_lines(chunk, epoch)",
        "to_lines(chunk, epoch - 1)",
        wire="lines",
    ),
    "largest-value-read-before-all-warps-have-said-theirs": Mutation(
        "codec_send.cuh",
        "__syncthreads();  // every warp has said what it found",
        "",
        wire="lines",
        setting="codec",
    ),
    "scales-taken-from-any-epoch": Mutation(
        "codec_recv.cuh",
        "        if (!wait_piece(a, piece, epoch, r)) return false;",
        "",
        wire="lines",
        setting="codec",
    ),
    "meta-read-before-it-is-kept": Mutation(
        "dispatch_recv_lines.cu",
        "space.head_piece[2 * lane_id() + 1] = chunk.high;\n    }\n    __syncwarp();",
        "space.head_piece[2 * lane_id() + 1] = chunk.high;\n    }",
        wire="lines",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    right = source.load(mutation.name)
    assert right.count(mutation.right) == 1, "the kernel has changed; state the fault anew"
    wrong = right.replace(mutation.right, mutation.wrong)
    # In a process of its own: a faulty kernel may also write anywhere.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            found = pool.submit(_first_seed_that_fails, mutation, wrong).result()
        except BrokenProcessPool:
            return
    assert found is not None, f"no seed of {SEEDS} notices"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("wire", ["flags", "lines"])
def test_the_right_kernels_pass_every_seed(wire: str, setting: str) -> None:
    cases = _cases(wire, setting)
    for seed in range(SEEDS + 1):
        _simulate(cases, setting, seed)


def _first_seed_that_fails(mutation: Mutation, text: str) -> int | None:
    plain = source.load
    source.load = lambda name: text if name == mutation.name else plain(name)  # type: ignore
    cases = _cases(mutation.wire, mutation.setting)
    for seed in range(1, SEEDS + 1):
        try:
            _simulate(cases, mutation.setting, seed)
        except (mc.MoecommError, AssertionError):
            return seed
    return None


def _cases(wire: str, setting: str) -> list[Case]:
    """Steps that give a fault its chance."""
    cfg = dataclasses.replace(CFG, wire=wire)
    if setting == "sender":
        cfg = dataclasses.replace(cfg, reduce="sender")
    if setting == "codec":  # a row's scale is sent long after its beginning
        cfg = dataclasses.replace(cfg, hidden=2000, codec=Int8PerToken, decode_to="bfloat16")
        return [make_case(cfg, 2, step, tokens=[3, 2], input_dtype="float32") for step in range(2)]
    if setting == "replicas":  # of each pair, one replica has nothing to send
        cfg = dataclasses.replace(cfg, replicas=2)
        return [make_case(cfg, 4, step, tokens=[1, 1]) for step in range(STEPS)]
    if setting == "sparse":  # rank 2 sends nothing and runs ahead as far as it may
        idxs = [np.full((4, 3), 0), np.full((6, 3), 6), np.empty((0, 3))]
        idxs = [idx.astype(np.int32) for idx in idxs]
        return [make_case(cfg, 3, step, idxs=idxs) for step in range(STEPS)]
    return [make_case(cfg, 3, step, tokens=[15, 4, 6]) for step in range(STEPS)]


def _simulate(cases: list[Case], setting: str, seed: int) -> None:
    combine = setting != "uncombined"
    with pytest.MonkeyPatch.context() as patch:
        if setting == "divided":  # as batches of more than 512 tokens are
            patch.setattr(layout, "UNDIVIDED_TOKENS", 4)
            patch.setattr(layout, "LEAST_CHUNK", 4)
        simulate(_steps, cases[0].num_ranks, cases, combine, seed=seed, checks="strict")


def _steps(group: mc.Group, cases: list[Case], combine: bool) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            recv = comm.dispatch_recv(send(comm, case))
            compare_received(case, group.rank, recv)
            if combine:
                finish(comm, case, recv)
            else:
                recv.handle.close()
