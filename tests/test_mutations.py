"""Would the tests notice? One fault at a time goes into the kernels, and must be found.

Each fault is one line that a tired author could get wrong. The simulation runs the faulty kernels
over at most 40 seeds, with its checks on; the right kernels pass all 40.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from exchange import Case, make_case, run_case

import moecomm as mc
from moecomm.emulator import simulate
from moecomm.kernels import emulated, source

SEEDS = 40
NUM_RANKS = 3
# One slot: every step reuses the memory of the one before. Few columns: time goes to ordering.
CFG = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=72, max_tokens=12, layout="grouped", in_flight=1, timeout_s=2.0
)
STEPS = 3


@dataclass(frozen=True)
class Mutation:
    """In file ``name``, the one place that reads ``right`` becomes ``wrong``."""

    name: str
    right: str
    wrong: str
    reduce: str = "receiver"


MUTATIONS = {
    "count-published-before-it-is-complete": Mutation(
        "dispatch_send.cu",
        "count_tokens(a, s, 0, tokens);\n        __syncthreads();",
        "count_tokens(a, s, 0, tokens);",
    ),
    "record-flag-not-released": Mutation(
        "dispatch_send.cu",
        "st_release_sys(plan.flag[threadIdx.x], epoch)",
        "st_relaxed_sys(plan.flag[threadIdx.x], epoch)",
    ),
    "flag-before-its-data": Mutation(
        "dispatch_send.cu",
        "send_row(a, plan, t);\n",
        "if (threadIdx.x < plan.num_dest) st_release_sys(plan.flag[threadIdx.x], epoch);\n"
        "            send_row(a, plan, t);\n",
    ),
    "no-barrier-before-the-record-flag": Mutation(
        "dispatch_send.cu",
        "__syncthreads();  // every thread's part of the record comes before its flag",
        "",
    ),
    "no-barrier-after-the-plan": Mutation(
        "dispatch_send.cu",
        "if (warp_id() == 0) plan_token(a, s, t);\n        __syncthreads();",
        "if (warp_id() == 0) plan_token(a, s, t);",
    ),
    "plan-overwritten-while-it-is-read": Mutation(
        "dispatch_send.cu", "__syncthreads();  // nobody still reads the plan", ""
    ),
    "reuse-before-acknowledgement": Mutation(
        "dispatch_send.cu", "if (!acks_arrived(a, epoch)) return;", ""
    ),
    "acknowledgement-of-the-wrong-epoch": Mutation(
        "dispatch_recv.cu",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch + 1)",
    ),
    "acknowledgement-not-released": Mutation(
        "dispatch_recv.cu",
        "st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
        "st_relaxed_sys(ack_flag(peer_base(a, r), a, a.rank), epoch)",
    ),
    "head-not-released": Mutation(
        "dispatch_send.cu", "st_release_sys(at, value);", "st_relaxed_sys(at, value);"
    ),
    "wait-without-acquire": Mutation(
        "protocol.cuh",
        "word = ld_acquire_sys(flag);\n        const u64 waited",
        "word = ld_relaxed_sys(flag);\n        const u64 waited",
    ),
    "stale-epoch-accepted": Mutation(
        "dispatch_recv.cu",
        "record_flag(a.symmetric, a, group, i), FlagReached{epoch}",
        "record_flag(a.symmetric, a, group, i), FlagReached{epoch - 1}",
    ),
    "record-read-without-a-barrier": Mutation(
        "dispatch_recv.cu",
        "if (warp_id() == 0) plan_record(a, s, record, j, group);\n        __syncthreads();",
        "if (warp_id() == 0) plan_record(a, s, record, j, group);",
    ),
    "last-block-does-not-wait-for-its-threads": Mutation(
        "common.cuh",
        "{\n    __syncthreads();\n    bool last = false;",
        "{\n    bool last = false;",
    ),
    "combine-flag-not-released": Mutation(
        "combine_send.cu",
        "st_release_sys(combine_flag(",
        "st_relaxed_sys(combine_flag(",
    ),
    "no-barrier-before-the-combine-flag": Mutation(
        "combine_send.cu",
        "__syncthreads();  // every thread's part of a row comes before its flag",
        "",
        reduce="sender",
    ),
    "combine-stale-epoch-accepted": Mutation(
        "combine_recv.cu",
        "tok.place[threadIdx.x]), FlagReached{epoch}",
        "tok.place[threadIdx.x]), FlagReached{epoch - 1}",
    ),
    "combine-waits-for-all-but-one-row": Mutation(
        "combine_recv.cu", "if (threadIdx.x < tok.num)\n", "if (threadIdx.x + 1 < tok.num)\n"
    ),
    "token-overwritten-while-it-is-read": Mutation(
        "combine_recv.cu", "__syncthreads();  // nobody still reads this token", ""
    ),
}


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Programs are remembered by stage, not by source text, which never changes otherwise."""
    emulated._program.cache_clear()
    yield
    emulated._program.cache_clear()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(
    name: str, fresh_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation = MUTATIONS[name]
    original = source.load(mutation.name)
    assert original.count(mutation.right) == 1, "the kernel has changed; state the fault anew"
    text = original.replace(mutation.right, mutation.wrong)
    plain = source.load
    monkeypatch.setattr(source, "load", lambda f: text if f == mutation.name else plain(f))
    cases = _cases(mutation.reduce)
    assert any(_fails(seed, cases) for seed in range(1, SEEDS + 1)), f"no seed of {SEEDS} notices"


@pytest.mark.parametrize("reduce", ["receiver", "sender"])
def test_the_right_kernels_pass_every_seed(reduce: str) -> None:
    cases = _cases(reduce)
    for seed in range(SEEDS + 1):
        simulate(_steps, NUM_RANKS, cases, seed=seed)


def _fails(seed: int, cases: list[Case]) -> bool:
    try:
        simulate(_steps, NUM_RANKS, cases, seed=seed)
    except (mc.MoecommError, AssertionError):
        return True
    return False


def _cases(reduce: str) -> list[Case]:
    cfg = dataclasses.replace(CFG, reduce=reduce)
    return [make_case(cfg, NUM_RANKS, step, tokens=[12, 9, 12]) for step in range(STEPS)]


def _steps(group: mc.Group, cases: list[Case]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
