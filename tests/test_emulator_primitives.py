"""Every primitive of the emulator against numpy, with fair and with fuzzed schedules."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator_programs import program

from moecomm.emulator import CheckFailure, Deadlock, EmulatorError, ProcessWorld, simulate
from moecomm.errors import ConfigError, StateError

FULL = 0xFFFFFFFF
POISON = 0xCBCBCBCB
UNTOUCHED = 0xDDDDDDDD
Run = Callable[..., tuple[np.ndarray, np.ndarray]]


def _args(
    values: np.ndarray,
    out: np.ndarray,
    words: np.ndarray,
    mask: int,
    param: int,
    width: int,
    exiting: int,
) -> bytes:
    addresses = (values.ctypes.data, out.ctypes.data, words.ctypes.data)
    return struct.pack("3Q4I", *addresses, mask, param, width, exiting)


@pytest.fixture(params=["process", "fair", 1, 2, 3])
def run(request: pytest.FixtureRequest) -> Run:
    """Launch a kernel of ``primitives.cu``; returns ``out`` and ``words``."""

    def launch(
        kernel: str,
        values: Any = (),
        *,
        grid: Any = 1,
        block: Any = 32,
        shared: int = 0,
        mask: int = FULL,
        param: int = 0,
        width: int = 32,
        exiting: int = 0,
        config: tuple[int, ...] = (),
        outputs: int = 4096,
        start: int = UNTOUCHED,
        checks: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        source = np.zeros(4096, np.uint32)
        source[: len(values)] = values
        out, words = np.full(outputs, start, np.uint32), np.zeros(4096, np.uint64)
        built = program("primitives")
        args = _args(source, out, words, mask, param, width, exiting)
        if kernel == "nothing":
            args = b""
        if request.param == "process":
            with ProcessWorld(built, config) as world:
                world.launch(kernel, args, grid, block, shared)
            return out, words
        seed = 0 if request.param == "fair" else request.param

        def body(group: Any) -> None:
            group.simulation.launch(0, built, config, kernel, args, grid, block, shared)

        simulate(body, 1, seed=seed, checks=checks)
        return out, words

    return launch


def test_indices(run: Run) -> None:
    grid, block = (2, 3, 2), (5, 3, 4)
    out, _ = run("indices", grid=grid, block=block, outputs=12 * 12 * 60)
    rows = out.reshape(12, 60, 12)
    for b in range(12):
        for t in range(60):
            expected = [t % 5, t // 5 % 3, t // 15, b % 2, b // 2 % 3, b // 6, *block, *grid]
            assert rows[b, t].tolist() == expected


VALUES = np.arange(64) * 37 % 101


def _source_lane(kernel: str, lane: int, param: int, width: int) -> int:
    first = lane // width * width
    if kernel == "shuffle":
        return first + param % width
    if kernel == "shuffle_up":
        return lane - param if lane - param >= first else lane
    if kernel == "shuffle_down":
        return lane + param if lane + param < first + width else lane
    other = lane ^ param
    return other if other < first + width else lane


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("param", [0, 1, 5, 19])
@pytest.mark.parametrize("kernel", ["shuffle", "shuffle_up", "shuffle_down", "shuffle_xor"])
def test_shuffles(run: Run, kernel: str, param: int, width: int) -> None:
    out, _ = run(kernel, VALUES, block=64, param=param, width=width)
    for i in range(64):
        lane = _source_lane(kernel, i % 32, param, width)
        assert out[i] == VALUES[i // 32 * 32 + lane], (i, lane)


def _expected(kernel: str, values: np.ndarray, lanes: np.ndarray, i: int, param: int) -> int:
    """Result on thread ``i`` when ``lanes`` (thread numbers of its warp) take part."""
    taking = values[lanes].astype(np.int64)
    bits = 1 << (lanes % 32)
    table = {
        "ballot": int(bits[taking % 2 == 1].sum()),
        "any_of": int((taking == param).any()),
        "all_of": int((taking != param).all()),
        "match_any": int(bits[taking % 5 == values[i] % 5].sum()),
        "reduce_add": int(taking.sum()),
        "reduce_max": int(taking.max() - 50) % 2**32,
        "reduce_min": int(taking.min() - 50) % 2**32,
    }
    return table[kernel]


@pytest.mark.parametrize(
    "kernel",
    ["ballot", "any_of", "all_of", "match_any", "reduce_add", "reduce_max", "reduce_min"],
)
@pytest.mark.parametrize(
    ("mask", "exiting", "block"),
    [(FULL, 0, 64), (0x0FF0F00F, 0, 64), (FULL, 0xFF, 64), (FULL, 0, 45), (1 << 7, 0, 64)],
    ids=["all", "partial-mask", "exited-lanes", "short-last-warp", "one-lane"],
)
def test_votes_and_reductions(run: Run, kernel: str, mask: int, exiting: int, block: int) -> None:
    param = int(VALUES[13])
    out, _ = run(kernel, VALUES, block=block, mask=mask, param=param, exiting=exiting)
    threads = np.arange(block)
    taking = threads[((mask & ~exiting) >> (threads % 32) & 1) == 1]
    for i in range(block):
        if i not in taking:
            assert out[i] == UNTOUCHED
            continue
        lanes = taking[taking // 32 == i // 32]
        assert out[i] == _expected(kernel, VALUES, lanes, i, param), i


def test_shuffle_from_a_lane_that_is_gone_gives_poison(run: Run) -> None:
    out, _ = run("shuffle", VALUES, param=3, exiting=1 << 3)
    assert set(out[[0, 1, 2, *range(4, 32)]]) == {POISON}


def test_shuffles_of_other_types(run: Run) -> None:
    out, words = run("shuffle_wide", VALUES, param=9)
    values = VALUES[:32].astype(float)
    assert out[:32].tolist() == [int(values[i] + values[i ^ 16] * 0.5) for i in range(32)]
    assert words[:32].tolist() == [int(VALUES[9]) << 40] * 32
    out, _ = run("shuffle_float", VALUES)
    assert out[:32].view(np.float32).tolist() == [float(VALUES[i ^ 1]) for i in range(32)]


def test_disjoint_masks_at_the_same_time(run: Run) -> None:
    out, _ = run("half_warps", VALUES, block=64)
    for warp in range(2):
        low, high = VALUES[warp * 32 : warp * 32 + 16], VALUES[warp * 32 + 16 : warp * 32 + 32]
        expected = int(low.sum()) * 16**3 + int(high.sum())
        assert set(out[warp * 32 : warp * 32 + 32]) == {expected}


@pytest.mark.parametrize("threads", [96, 50, 1])
@pytest.mark.parametrize("block", [96, 70])
def test_block_barriers(run: Run, threads: int, block: int) -> None:
    """``threads`` of each block stay, the others return before the first barrier."""
    n = min(threads, block)
    values = np.arange(2 * block) * 7 % 90
    out, _ = run("barriers", values, grid=2, block=block, shared=4 * block, exiting=n, param=60)
    for b in range(2):
        v = values[b * block : b * block + n]
        for _ in range(5):
            v = np.roll(v, -1) + 1
        flags = int((v % 2).sum()) << 2 | int((v == 60).any()) << 1 | int((v != 60).all())
        assert out[b * block : b * block + n].tolist() == [int(x) << 8 | flags for x in v]


def test_a_thread_that_leaves_late_is_not_waited_for(run: Run) -> None:
    out, _ = run("late_exit", block=64, param=20)
    assert out[:63].tolist() == [1] * 63


def test_shared_memory_is_poisoned_for_every_block_of_every_launch(run: Run) -> None:
    for _ in range(2):
        out, _ = run("poison", grid=3, block=32, shared=128, checks=False)
        assert set(out[:96]) == {POISON}


def test_atomics(run: Run) -> None:
    values = (np.arange(192) * 53 + 5) % 211
    assert 77 in values
    out, words = run("atomics", values, grid=3, block=64, start=100)
    inc = 100
    for _ in range(192):
        inc = 0 if inc >= 9 else inc + 1
    ticket = 100
    for _ in range(192):
        ticket = 0 if ticket >= 6 else ticket + 1
    ors = 100
    for v in values:
        ors |= 1 << int(v) % 32
    total = int(values.sum())
    half = np.uint32(100).view(np.float32)
    for _ in range(192):
        half = np.float32(half + np.float32(0.5))
    assert out[:10].tolist() == [
        100 + total, max(100, values.max()), min(100, values.min()), inc, ors,
        int(half.view(np.uint32)), (100 - 192) % 2**32, 100 + total, 77, ticket,
    ]  # fmt: skip
    assert words[:3].tolist() == [total << 32, total, 2 * 192]


def test_memory_wrappers(run: Run) -> None:
    values = np.random.default_rng(1).integers(0, 2**32, 32 * 8 * 2, dtype=np.uint32)
    out, _ = run("memory", values, grid=2)
    assert (out[: 2 * 32 * 8] == values).all()


def test_bits_and_rounding(run: Run) -> None:
    out, _ = run("bits", [0x00F0_0310], block=1)
    one = np.float32(1.1)
    square = one * one
    assert out[:12].tolist() == [
        7, 5, 8, int(f"{0x00F00310:032b}"[::-1], 2), int(square.view(np.uint32)),
        int((square + np.float32(-1.21)).view(np.uint32)),
        int((np.float32(1) / np.float32(3)).view(np.uint32)), (-7) % 2**32, 3, 32, 0,
        int(np.float32(2).view(np.uint32)),
    ]  # fmt: skip


def test_configuration_words(run: Run) -> None:
    assert run("configured", config=(40, 2), block=1)[0][0] == 42


def test_a_kernel_without_arguments(run: Run) -> None:
    run("nothing", grid=4, block=64)


def test_deep_stacks(run: Run) -> None:
    out, _ = run("deep_stack", [3], block=32, param=40)
    assert out[:32].tolist() == [120] * 32


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        ("divergent_barrier", Deadlock, "__syncthreads"),
        ("mixed_barriers", CheckFailure, "__syncthreads_or"),
        ("foreign_mask", CheckFailure, "mask 0x1, which does not hold its own lane"),
        ("crossed_masks", CheckFailure, "mask 0xffff"),
        ("mixed_collectives", CheckFailure, "__ballot_sync"),
        ("missing_lane", EmulatorError, "__syncwarp"),
    ],
)
def test_divergence_is_reported_not_hung(
    run: Run, kernel: str, error: type[EmulatorError], words: str
) -> None:
    with pytest.raises(error) as caught:
        run(kernel, block=32)
    assert kernel in caught.value.report
    assert words in caught.value.report
    assert "block 0" in caught.value.report


def test_a_world_goes_on_after_a_failure() -> None:
    out, words = np.zeros(64, np.uint32), np.zeros(8, np.uint64)
    args = _args(out, out, words, FULL, 0, 32, 0)
    with ProcessWorld(program("primitives"), (1, 2)) as world:
        for _ in range(3):
            with pytest.raises(Deadlock):
                world.launch("divergent_barrier", args, 2, 64)
            world.launch("configured", args, 1, 1)
            assert out[0] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": "absent"}, "kernel='absent'"),
        ({"args": b"12"}, "takes 40"),
        ({"grid": 0}, "grid=0"),
        ({"block": 2048}, "at most 1024"),
        ({"grid": 1 << 20}, "at most"),
        ({"shared_bytes": 1 << 20}, "shared_bytes"),
        ({"block": (1, 1, 1, 1)}, "1 to 3 integers"),
    ],
)
def test_impossible_launches_are_refused(change: dict[str, Any], words: str) -> None:
    launch = {"kernel": "bits", "args": bytes(40), "grid": 1, "block": 32, "shared_bytes": 0}
    with ProcessWorld(program("primitives")) as world, pytest.raises(ConfigError, match=words):
        world.launch(**{**launch, **change})


def test_a_closed_world_refuses() -> None:
    world = ProcessWorld(program("primitives"))
    world.close()
    world.close()
    with pytest.raises(StateError):
        world.launch("nothing", b"", 1, 1)
