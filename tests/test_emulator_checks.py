"""The checks find each planted mistake, in the words of a report, and nothing in right kernels."""

from __future__ import annotations

import pickle
import struct
from typing import Any, Literal

import numpy as np
import pytest
from emulator_programs import MUTATIONS, Exchange, program, run_exchange

from moecomm.emulator import CheckFailure, simulate

RANKS, EPOCHS, SEEDS = 3, 3, 40
MISTAKE_SEEDS = 12  # nearly every seed finds each
Checks = bool | Literal["strict"]


def exchange(
    seed: int, mutation: str = "none", sender: str = "send", checks: Checks = True
) -> None:
    """A few epochs of a small all-to-all; what arrives is compared."""
    world = Exchange(RANKS)
    code = MUTATIONS[mutation]
    received = simulate(run_exchange, RANKS, world, EPOCHS, code, sender, seed=seed, checks=checks)
    for rank in range(RANKS):
        for epoch in range(1, EPOCHS + 1):
            np.testing.assert_array_equal(received[rank][epoch - 1], world.expected(rank, epoch))


@pytest.mark.parametrize("checks", [True, "strict"])
@pytest.mark.parametrize("sender", ["send", "send_warps"])
def test_right_kernels_pass_all_seeds(sender: str, checks: Checks) -> None:
    for seed in range(SEEDS):
        exchange(seed, sender=sender, checks=checks)


FOUND = {
    "missing release": ("race", "send", ("read of slots", "receive on rank", "send on rank")),
    "missing acquire": ("race", "send", ("read of slots", "after the write", "epoch 1")),
    "dropped barrier": ("race", "send", ("read of slots", "thread")),
    "dropped syncwarp": ("race", "send_warps", ("read of slots", "send_warps on rank")),
    "reuse before ack": ("race", "send", ("write of slots", "after the read", "epoch 2")),
    "stale word": ("stale read", "send", ("slots+0x9c of rank", "data of epoch 1", "epoch 2")),
    "unwritten word": ("uninitialised read", "send", ("slots+0x9c of rank", "epoch 1")),
}


@pytest.mark.parametrize("mutation", FOUND)
@pytest.mark.parametrize("checks", [True, "strict"])
def test_mistakes_are_found_and_named(mutation: str, checks: Checks) -> None:
    kind, sender, words = FOUND[mutation]
    failures = []
    for seed in range(MISTAKE_SEEDS):
        with pytest.raises((CheckFailure, AssertionError)) as caught:
            exchange(seed, mutation, sender, checks)
        if isinstance(caught.value, CheckFailure):
            failures.append(caught.value)
    of_kind = [f for f in failures if f.kind == kind]
    assert len(of_kind) >= MISTAKE_SEEDS * 3 // 4
    assert all(word in of_kind[0].report for word in words), of_kind[0].report


def test_a_mistake_that_gives_right_values_is_found() -> None:
    """Without the checks most schedules show nothing."""
    passed = 0
    for seed in range(10):
        exchange(seed, "missing release", checks=False)
        passed += 1
        with pytest.raises(CheckFailure):
            exchange(seed, "missing release")
    assert passed == 10


def test_votes_order_memory_only_when_not_strict() -> None:
    """CUDA promises that __syncwarp orders memory, and does not promise it of votes."""
    for seed in range(10):
        exchange(seed, "shuffle only", "send_warps")
        with pytest.raises(CheckFailure) as caught:
            exchange(seed, "shuffle only", "send_warps", "strict")
        assert caught.value.kind == "race"


def test_a_failure_pickles() -> None:
    failure = CheckFailure("race", 2, "read of x")
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.kind, copy.rank, copy.report, str(copy)) == ("race", 2, "read of x", str(failure))


# ---- single kernels -----------------------------------------------------------------------------
def single(
    kernel: str,
    kind: Any = "local",
    *,
    seed: int = 1,
    repeat: int = 1,
    exchanges: bool = False,
    ranks: int = 1,
    written: int = 0,
    num_bytes: int = 1024,
    threads: int = 64,
    shared: int = 256,
) -> np.ndarray:
    """Run ``kernel`` of ``accesses.cu`` on ``ranks`` ranks and the memory of rank 0."""
    memory = np.zeros(2048, np.uint8)
    first = (-memory.ctypes.data) % 16
    area = memory[first : first + 1024]

    def body(group: Any) -> None:
        simulation, address = group.simulation, area.ctypes.data
        if group.rank == 0:
            simulation.register(0, address, num_bytes, kind, "area")
            if written:
                simulation.mark_written(0, address, written)
        group.barrier()
        for turn in range(repeat):
            args = struct.pack("3Q", address, group.rank, turn)
            simulation.launch(group.rank, program("accesses"), [], kernel, args, 2, threads, shared)
            if exchanges:
                group.barrier(label=f"turn {turn}")

    simulate(body, ranks, seed=seed)
    return area


CLEAN = {
    "each thread its own byte": {"kernel": "own_bytes"},
    "each thread its own half": {"kernel": "own_halves"},
    "launch order": {"kernel": "read_next_write_own", "repeat": 3, "written": 1024},
    "atomics among themselves": {"kernel": "only_atomics", "repeat": 2},
    "host exchange": {
        "kernel": "turns",
        "repeat": 4,
        "exchanges": True,
        "ranks": 2,
        "kind": "input",
    },
    "readers, barrier, writer": {"kernel": "many_readers", "written": 1024},
    "fences": {"kernel": "fences", "written": 1024},
    "sums behind a barrier": {"kernel": "sum_then_read"},
    "written by the host": {"kernel": "read_all", "written": 1024},
    "input": {"kernel": "read_all", "kind": "input"},
    "shared memory, barriers": {"kernel": "shared_rotate", "repeat": 2},
    "shared memory, warps": {"kernel": "shared_in_warp", "repeat": 2},
    "shared memory, atomics": {"kernel": "shared_counter", "repeat": 2},
    "shared memory, structures": {"kernel": "shared_structures", "shared": 384},
}


@pytest.mark.parametrize("case", CLEAN)
def test_ordered_accesses_pass(case: str) -> None:
    options = CLEAN[case]
    for seed in range(10):
        single(**options, seed=seed)  # type: ignore[arg-type]


WRONG = {
    "two threads, one byte": ("race", {"kernel": "shared_byte"}),
    "no host exchange": (
        "race", {"kernel": "turns", "repeat": 4, "ranks": 2, "kind": "input"},
    ),
    "reader without barrier": ("race", {"kernel": "many_readers_no_barrier", "written": 1024}),
    "one fence missing": ("race", {"kernel": "one_fence", "written": 1024}),
    "plain read of a sum": ("race", {"kernel": "sum_and_read"}),
    "plain write of a flag": ("race", {"kernel": "plain_flag", "written": 1024}),
    "half written": ("uninitialised read", {"kernel": "read_all", "written": 512}),
    "one byte unwritten": ("uninitialised read", {"kernel": "own_bytes_read_words"}),
    "another rank's counter": (
        "wrong scope", {"kernel": "only_atomics", "ranks": 2, "kind": "input"},
    ),
    "another rank's own memory": ("foreign access", {"kernel": "turns", "ranks": 2, "repeat": 2}),
    "misaligned": ("misaligned access", {"kernel": "misaligned", "kind": "input"}),
    "shared memory, no barrier": ("race", {"kernel": "shared_no_barrier"}),
    "shared memory, no syncwarp": ("race", {"kernel": "shared_no_syncwarp"}),
    "shared memory, structures": (
        "race", {"kernel": "shared_structures_no_barrier", "shared": 384},
    ),
    "shared memory, unwritten": ("uninitialised read", {"kernel": "shared_unwritten"}),
    "shared memory, past the end": (
        "access out of range", {"kernel": "shared_past_the_end", "shared": 252},
    ),
    "no wrapper": ("race", {"kernel": "unwrapped", "written": 1024}),
    "past the end": (
        "access out of range", {"kernel": "read_all", "kind": "input", "num_bytes": 1016},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_accesses_are_found(case: str) -> None:
    kind, options = WRONG[case]
    for seed in range(5):
        with pytest.raises(CheckFailure) as caught:
            single(**options, seed=seed)  # type: ignore[arg-type]
        assert caught.value.kind == kind
        where = "shared[block" if case.startswith("shared") else "area+0x"
        assert where in caught.value.report
        assert str(options["kernel"]) in caught.value.report


def test_unregistered_memory_is_not_watched() -> None:
    single("shared_byte", num_bytes=0)


def test_registering_again_forgets() -> None:
    with pytest.raises(CheckFailure):
        single("read_all", written=0)
    area = np.zeros(4096, np.uint8)

    def body(group: Any) -> None:
        simulation = group.simulation
        address = area.ctypes.data + (-area.ctypes.data) % 16
        args = struct.pack("3Q", address, 0, 0)
        simulation.register(0, address, 1024, "local", "before")
        simulation.mark_written(0, address, 1024)
        simulation.launch(0, program("accesses"), [], "read_all", args, 2, 64)
        simulation.register(0, address + 256, 512, "local", "after")
        with pytest.raises(CheckFailure, match=r"after\+0x"):
            simulation.launch(0, program("accesses"), [], "read_all", args, 2, 64)

    with pytest.raises(CheckFailure, match="uninitialised"):  # raised again: it is never lost
        simulate(body, 1)


def test_huge_ranges_cost_nothing_until_touched() -> None:
    def body(group: Any) -> None:
        for i in range(16):
            group.simulation.register(0, (1 << 40) + (i << 36), 1 << 35, "symmetric", f"slot {i}")
            group.simulation.mark_written(0, (1 << 40) + (i << 36), 1 << 34)

    simulate(body, 1)
