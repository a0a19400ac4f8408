"""Would the tests notice a fault in the kernels? Each of these must be found; see ``mutations``.

The simulation runs the faulty kernels over at most 40 seeds, with its checks on; the right kernels
pass all 40, and the fair schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mutation_steps import SETTINGS, cases, simulate_setting
from mutations import SEEDS, Mutation, Search, first_failure, mutate, searching

MUTATIONS = {
    "count-published-before-it-is-complete": Mutation(
        "routing.cuh",
        "    if (!may_send(a, state, epoch)) return false;\n    if (REMOTE) plan_heads",
        "    if (REMOTE) plan_heads",
    ),
    "record-flag-not-released": Mutation(
        "dispatch_send.cu",
        "st_release_sys(plan.flag[d], epoch)",
        "st_relaxed_sys(plan.flag[d], epoch)",
    ),
    "flag-before-its-data": Mutation(
        "dispatch_send.cu",
        "    make_row(a, t, BLOCK_PER_ROW",
        "    if (lane_id() < plan.num_dest) st_release_sys(plan.flag[lane_id()], epoch);\n"
        "    make_row(a, t, BLOCK_PER_ROW",
    ),
    "no-barrier-before-the-record-flag": Mutation(
        "dispatch_send.cu",
        "team_sync();  // every thread's part of the records comes before their flags",
        "",
    ),
    "no-barrier-after-the-plan": Mutation(
        "dispatch_send.cu",
        "        if (!may_send(a, state, epoch)) return;\n",
        "",
    ),
    "counters-changed-while-others-read-them": Mutation(
        "dispatch_send.cu",
        "__syncthreads();  // all are placed: nobody still reads counters or others' plans",
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
        "__syncwarp();  // the plan is made",
        "",
    ),
    "one-block-copies-before-the-heads": Mutation(
        "placement.cuh", "if (!heads_arrived(a, s, epoch)) return false;", ""
    ),
    "combine-flag-not-released": Mutation(
        "combine_send.cu", "st_release_sys(combine_flag(", "st_relaxed_sys(combine_flag("
    ),
    "no-barrier-before-the-combine-flag": Mutation(
        "combine_send.cu",
        "team_sync();  // every thread's part of a row comes before its flag",
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
        "team.cuh", "__syncwarp();  // a vote orders no memory", ""
    ),
    "token-overwritten-while-it-is-read": Mutation(
        "combine_recv.cu", "team_sync();  // nobody still reads this team's space", ""
    ),
    "record-made-before-its-place-is-known": Mutation(
        "dispatch_send.cu",
        "__syncthreads();  // all are placed: nobody still reads counters or others' plans",
        "",
        setting="blocks",
    ),
    "plan-overwritten-while-others-send": Mutation(
        "dispatch_send.cu",
        "if (REMOTE || (more && BLOCK_PER_ROW)) __syncthreads();",
        "if (REMOTE) __syncthreads();",
        setting="blocks",
    ),
    "record-awaited-and-planned-by-one-warp-only": Mutation(
        "dispatch_recv.cu",
        "if (!team_all(ok)) return;  // a barrier, too: the plan is made",
        "if (!ok) return;",
        setting="blocks",
    ),
    "rows-returned-before-it-is-known-which": Mutation(
        "combine_send.cu",
        "if (leads_team()) load_returned(a, rec, j);\n    team_sync();",
        "if (leads_team()) load_returned(a, rec, j);",
        setting="blocks",
    ),
    "combine-flags-awaited-by-one-warp-only": Mutation(
        "combine_recv.cu",
        "if (!team_all(ok)) return;",
        "if (!ok) return;",
        setting="blocks",
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
    "only-the-first-of-several-pieces-waited-for": Mutation(
        "line.cuh",
        "if (!all_there(r[i])) first = i;",
        "if (!all_there(r[i]) && i == 0) first = i;",
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


RIGHT = [f"{wire}-{setting}" for wire in ("flags", "lines") for setting in SETTINGS]


@pytest.fixture(scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[Search]:
    arguments: dict[str, tuple[Any, ...]] = {name: (fault,) for name, fault in MUTATIONS.items()}
    arguments |= {name: (None, *name.split("-")) for name in RIGHT}
    yield from searching(request, _look, arguments)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(name: str, search: Search) -> None:
    assert search[name] is not None, f"no seed of {SEEDS} notices"


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_kernels_pass_every_seed(name: str, search: Search) -> None:
    assert search[name] is None


def _look(mutation: Mutation | None, wire: str = "", setting: str = "") -> str | None:
    if mutation is not None:
        mutate(mutation)
        wire, setting = mutation.wire, mutation.setting
    steps = cases(wire, setting)
    first = 0 if mutation is None else 1  # the fair schedule finds little
    return first_failure(
        lambda seed: simulate_setting(steps, setting, seed), range(first, SEEDS + 1)
    )
