"""Would the tests of remote peers notice? As ``test_mutations``, on ranks of different nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from mutation_steps import CFG, busy_cases, run_steps, sparse_cases
from mutations import SEEDS, Mutation, Search, first_failure, mutate, searching
from remote import World, pretend, served, simulate_remote

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
        "part_done(a, DOOR_ROWS, gridDim.x * num_teams(), epoch);",
        "ring(a, DOOR_ROWS, epoch);",
    ),
    "parts-counted-without-order": Mutation(
        "remote.cuh", "atomic_inc_acq_rel_gpu(done, parts - 1)", "atomicInc(done, parts - 1)"
    ),
    "door-not-released": Mutation(
        "remote.cuh",
        "st_release_sys(BOUNCE && door",
        "st_relaxed_sys(BOUNCE && door",
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
BOUNCE = {
    "door-rung-before-the-block-has-copied": Mutation(
        "bounce_push.cuh", "__syncthreads();  // every thread's part comes before the door", ""
    ),
    "door-rung-by-the-first-block": Mutation(
        "bounce_push.cuh", ") == gridDim.x - 1;", ") < gridDim.x;"
    ),
    "pushed-parts-counted-without-order": Mutation(
        "bounce_push.cuh",
        "atomic_inc_acq_rel_gpu(done, gridDim.x - 1)",
        "atomicInc(done, gridDim.x - 1)",
    ),
    "pushed-door-not-released": Mutation(
        "bounce_push.cuh", "st_release_sys(door_word(a, door)", "st_relaxed_sys(door_word(a, door)"
    ),
    "a-door-without-records-behind-it-comes-late": Mutation(
        "dispatch_push.cu",
        "if (!s.more) push_ring(a, DOOR_RECORDS, epoch);\n        push_ring(a, DOOR_HEAD, epoch);",
        "push_ring(a, DOOR_HEAD, epoch);\n        if (!s.more) push_ring(a, DOOR_RECORDS, epoch);",
    ),
    "private-records-pushed-with-the-others": Mutation(
        "dispatch_push.cu", "push_records(a, s, 0, (u32)PRIVATE_RECORDS);", ""
    ),
    "pushed-again": Mutation(
        "dispatch_push.cu",
        "    if (epoch == ld(pushed_word(a, HALF_DISPATCH))) return;\n",
        "",
        setting="beside",
    ),
    "rows-pushed-again": Mutation(
        "combine_push.cu",
        "    if (epoch == ld(pushed_word(a, HALF_COMBINE))) return;\n",
        "",
        setting="beside",
    ),
    "a-ticket-of-another-epoch": Mutation(
        "bounce_push.cuh",
        "const u64 low = epoch &",
        "const u64 low = (epoch + 1) &",
        setting="beside",
    ),
    "a-ticket-of-the-other-half": Mutation(
        "combine_push.cu",
        "push_ticket(a, HALF_COMBINE, epoch);",
        "push_ticket(a, HALF_DISPATCH, epoch);",
        setting="beside",
    ),
    "plan-of-rows-not-pushed": Mutation(
        "combine_push.cu", "push_plan(a, PLAN_ROW_FIRST, PLAN_ROW_BASE + 1);", ";", setting="busy"
    ),
    "pulled-before-the-block-has-copied": Mutation(
        "bounce_pull.cuh",
        "__syncthreads();  // every thread's part comes before `pulled`",
        "",
        setting="beside",
    ),
    "pulled-by-the-first-block": Mutation(
        "bounce_pull.cuh",
        "    if (atomic_inc_acq_rel_gpu(done, gridDim.x - 1) != gridDim.x - 1) return;\n",
        "    if (blockIdx.x == 0 && go >= GO_COPY)\n"
        "        st_release_sys(pulled_word(a, Half::HALF), go - GO_COPY);\n"
        "    if (atomic_inc_acq_rel_gpu(done, gridDim.x - 1) != gridDim.x - 1) return;\n",
        setting="beside",
    ),
    "pulled-parts-counted-without-order": Mutation(
        "bounce_pull.cuh",
        "atomic_inc_acq_rel_gpu(done, gridDim.x - 1)",
        "atomicInc(done, gridDim.x - 1)",
    ),
    "pulled-not-released": Mutation(
        "bounce_pull.cuh",
        "st_release_sys(pulled_word(a, Half::HALF)",
        "st_relaxed_sys(pulled_word(a, Half::HALF)",
        setting="beside",
    ),
    "others-sent-without-release": Mutation(
        "bounce_pull.cuh", "st_release_sys(word, go);", "st_relaxed_sys(word, go);"
    ),
    "anything-of-a-head-is-all": Mutation(
        "dispatch_pull.cu",
        "records > 0 && !has_arrived(a, source, CHANNEL_RECORDS, epoch, PHASE)",
        "false",
    ),
    "private-records-are-all": Mutation(
        "dispatch_pull.cu", "return records <= PRIVATE_RECORDS ||", "return true ||"
    ),
    "rows-pulled-of-any-epoch": Mutation(
        "combine_pull.cu",
        "has_arrived(a, source, CHANNEL_ROWS, epoch, PHASE)",
        "has_arrived(a, source, CHANNEL_ROWS, epoch - 1, PHASE)",
    ),
    "a-stage-does-not-wait-for-pull": Mutation(
        "remote_wait.cuh",
        "if (BOUNCE && channel != CHANNEL_ACK)\n        return",
        "if (BOUNCE && channel != CHANNEL_ACK)\n        return true ||",
        setting="beside",
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


def _with(wire: str, faults: dict[str, Mutation]) -> dict[str, Mutation]:
    return {f"{name} {wire}": dataclasses.replace(m, wire=wire) for name, m in faults.items()}


MUTATIONS = {
    **_with("proxied", PROXIED),
    **_with("proxied", WAITS),
    **_with("bounce", BOUNCE),
    **_with("nvshmem", {"rows-of-any-epoch": WAITS["rows-of-any-epoch"]}),
    **_with("nvshmem", NVSHMEM),
}
RIGHT = ["proxied", "bounce", "nvshmem"]


@pytest.fixture(scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[Search]:
    arguments: dict[str, tuple[Any, ...]] = {name: (fault,) for name, fault in MUTATIONS.items()}
    arguments |= {mode: (None, mode) for mode in RIGHT}
    arguments["beside"] = (None, "bounce", "beside")
    yield from searching(request, _look, arguments)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(name: str, search: Search) -> None:
    assert search[name] is not None, f"no seed of {SEEDS} notices"


@pytest.mark.parametrize("name", [*RIGHT, "beside"])
def test_the_right_kernels_pass_every_seed(name: str, search: Search) -> None:
    """The busy setting is one of ``test_remote``."""
    assert search[name] is None


def _look(mutation: Mutation | None, mode: Any = "", setting: str = "sparse") -> str | None:
    if mutation is not None:
        mutate(mutation)
        mode, setting = mutation.wire, mutation.setting
    cfg = dataclasses.replace(CFG, wire="flags", hidden=200)
    steps = sparse_cases(cfg) if setting == "sparse" else busy_cases(cfg)
    beside = "together" if setting == "beside" else ""
    world = World(served(mode, private_records=3, chunk=3), [0, 1, 1], beside)
    first = 0 if mutation is None else 1
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, world)
        return first_failure(
            lambda seed: simulate_remote(world, run_steps, steps, seed=seed),
            range(first, SEEDS + 1),
        )
