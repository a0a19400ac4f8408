"""Would the tests of remote peers notice? As ``test_mutations``, on ranks of different nodes."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import pytest
from exchange import Case, make_case
from remote import World, pretend, simulate_remote
from test_mutations import CFG, SEEDS, STEPS, _steps

import moecomm as mc
from moecomm.kernels import source
from moecomm.remote import Remote


@dataclass(frozen=True)
class Mutation:
    """In file ``name``, the one place that reads ``right`` becomes ``wrong``."""

    name: str
    right: str
    wrong: str
    mode: str = "proxied"
    setting: str = "busy"


PROXIED = {
    "head-rung-before-it-is-complete": Mutation(
        "remote_send.cuh",
        "    __syncthreads();\n    if (REMOTE == 1 && threadIdx.x == 0) ring(a, DOOR_HEAD, epoch);",
        "    if (REMOTE == 1 && threadIdx.x == 0) ring(a, DOOR_HEAD, epoch);",
    ),
    "records-rung-by-the-first-block": Mutation(
        "remote_send.cuh",
        "part_done(a, DOOR_RECORDS, num_row_blocks(), epoch);",
        "ring(a, DOOR_RECORDS, epoch);",
    ),
    "private-records-said-to-be-done-too-early": Mutation(
        "remote_send.cuh", "c.records[r] < min(", "c.records[r] + 1 < min("
    ),
    "rows-rung-by-the-first-warp": Mutation(
        "remote_rows.cuh",
        "part_done(a, DOOR_ROWS, gridDim.x * num_warps(), epoch);",
        "ring(a, DOOR_ROWS, epoch);",
    ),
    "parts-counted-without-order": Mutation(
        "remote.cuh", "atomic_inc_acq_rel_gpu(done, parts - 1)", "atomicInc(done, parts - 1)"
    ),
    "door-not-released": Mutation(
        "remote.cuh",
        "st_release_sys(flag_word(a, FLG_DOOR,",
        "st_relaxed_sys(flag_word(a, FLG_DOOR,",
    ),
    "arrival-passed-on-without-release": Mutation(
        "remote_wait.cuh", "st_release_sys(copy, wanted);", "st_relaxed_sys(copy, wanted);"
    ),
    "staging-reused-before-acknowledgement": Mutation(
        "remote_wait.cuh", "return max(rows,", "return ~0ull; return max(rows,", setting="sparse"
    ),
}
WAITS = {
    "head-of-any-epoch": Mutation(
        "remote_wait.cuh",
        "wait_arrived(a, source, CHANNEL_HEAD, epoch, epoch,",
        "wait_arrived(a, source, CHANNEL_HEAD, epoch - 1, epoch,",
    ),
    "records-of-any-epoch": Mutation(
        "dispatch_recv.cu",
        "wait_arrived(a, source, record_channel(i), epoch, epoch,",
        "wait_arrived(a, source, record_channel(i), epoch - 1, epoch,",
    ),
    "rows-of-any-epoch": Mutation(
        "owed.cuh",
        "wait_arrived(a, owed.peer[i], owed.channel[i], epoch, epoch,",
        "wait_arrived(a, owed.peer[i], owed.channel[i], epoch - 1, epoch,",
    ),
}
NVSHMEM = {
    "records-of-a-chunk-counted-without-order": Mutation(
        "remote_send.cuh", "atomic_add_acq_rel_gpu(packed, 1)", "atomicAdd(packed, 1u)"
    ),
    "rows-of-a-chunk-counted-without-order": Mutation(
        "remote_rows.cuh", "atomic_add_acq_rel_gpu(packed, 1)", "atomicAdd(packed, 1u)"
    ),
    "chunks-put-before-the-block-knows": Mutation(
        "remote_send.cuh", "__syncthreads();  // all know what is complete, and may read it", ""
    ),
    "rows-put-before-the-block-knows": Mutation(
        "combine_send.cu", "__syncthreads();  // all know what is complete, and may read it", ""
    ),
    "spaces-overwritten-while-they-are-put": Mutation(
        "combine_send.cu", "__syncthreads();  // nobody still reads the spaces", ""
    ),
    "flag-before-all-of-the-put": Mutation(
        "nvshmem.cuh",
        "threadIdx.x, blockDim.x);\n    __syncthreads();  // all of it comes before the flag",
        "threadIdx.x, blockDim.x);",
    ),
    "flag-before-all-of-the-head": Mutation(
        "nvshmem.cuh",
        "lane_id(), WARP_SIZE);\n    __syncwarp();  // all of it comes before the flag",
        "lane_id(), WARP_SIZE);",
    ),
    "a-put-short-of-a-record": Mutation(
        "remote.cuh", "return min(total - c", "return total <= 1 ? total : min(total - c - 1"
    ),
    "acknowledged-before-the-records-are-read": Mutation(
        "dispatch_recv.cu",
        "    DYNAMIC_SHARED(RowPlan, plans);",
        "    acknowledge(a, epoch);\n    DYNAMIC_SHARED(RowPlan, plans);",
        setting="sparse",
    ),
}


def _in_mode(found: dict[str, Mutation], mode: str) -> dict[str, Mutation]:
    return {f"{k} {mode}": dataclasses.replace(m, mode=mode) for k, m in found.items()}


MUTATIONS = {
    **PROXIED,
    **_in_mode(WAITS, "proxied"),
    **_in_mode({"rows-of-any-epoch": WAITS["rows-of-any-epoch"]}, "nvshmem"),
    **_in_mode(NVSHMEM, "nvshmem"),
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


@pytest.mark.parametrize("mode", ["proxied", "nvshmem"])
def test_the_right_kernels_pass_every_seed(mode: str) -> None:
    """The busy setting is one of ``test_remote``."""
    with pytest.MonkeyPatch.context() as patch:
        world = _world(mode)
        pretend(patch, world)
        for seed in range(SEEDS + 1):
            simulate_remote(world, _steps, _cases("sparse"), True, seed=seed)


def _world(mode: str) -> World:
    return World(Remote(mode=mode, private_records=3, chunk=3), [0, 1, 1])  # type: ignore[arg-type]


def _first_seed_that_fails(mutation: Mutation, text: str) -> int | None:
    plain = source.load
    source.load = lambda name: text if name == mutation.name else plain(name)  # type: ignore
    cases = _cases(mutation.setting)
    world = _world(mutation.mode)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, world)
        for seed in range(1, SEEDS + 1):
            try:
                simulate_remote(world, _steps, cases, True, seed=seed)
            except (mc.MoecommError, AssertionError):
                return seed
    return None


def _cases(setting: str) -> list[Case]:
    cfg = dataclasses.replace(CFG, wire="flags", hidden=200)
    if setting == "sparse":  # rank 2 sends nothing and runs ahead as far as it may
        idxs = [np.full((4, 3), 0), np.full((6, 3), 6), np.empty((0, 3))]
        idxs = [idx.astype(np.int32) for idx in idxs]
        return [make_case(cfg, 3, step, idxs=idxs) for step in range(STEPS)]
    return [make_case(cfg, 3, step, tokens=[15, 4, 6]) for step in range(STEPS)]
