"""MoeComm on ranks that are processes: every layout and dtype, many steps, many handles."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case
from schedules import for_rank, random_schedule, walk
from tensors import to_torch

import moecomm as mc

pytestmark = pytest.mark.usefixtures("poisoned")

BASE: dict[str, Any] = {"num_experts": 8, "top_k": 3, "hidden": 80, "max_tokens": 12}
FP8: dict[str, Any] = {"dispatch_dtype": "float8_e4m3fn", "scale_block": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "batched-receiver": {"layout": "batched"},
    "batched-sender": {"layout": "batched", "reduce": "sender"},
    "grouped-receiver": {"layout": "grouped", "expert_alignment": 8},
    "grouped-sender": {"layout": "grouped", "reduce": "sender"},
    "rank": {"layout": "rank"},
}
# name → (configuration, dtype of x where dispatch casts it)
DTYPES: dict[str, tuple[dict[str, Any], str | None]] = {
    "bf16": ({}, None),
    "fp16": ({"dispatch_dtype": "float16", "combine_dtype": "float16"}, None),
    "fp32": ({"dispatch_dtype": "float32", "combine_dtype": "float32"}, None),
    "bf16-to-fp32": ({"combine_dtype": "float32"}, None),
    "fp8-given": (FP8, None),
    "fp8-unscaled": ({"dispatch_dtype": "float8_e4m3fn"}, "bfloat16"),
    "fp8-from-bf16": (FP8, "bfloat16"),
    "fp8-from-fp16": ({**FP8, "combine_dtype": "float16"}, "float16"),
    "fp8-from-fp32-pow2": ({**FP8, "scale_pow2": True}, "float32"),
}
MATRIX = {
    f"{layout}-{dtype}-{wire}": (
        mc.MoeConfig(**BASE, **LAYOUTS[layout], **fields, wire=wire),
        input_dtype,
    )
    for wire in ("lines", "flags")
    for layout in LAYOUTS
    for dtype, (fields, input_dtype) in DTYPES.items()
}
TOKENS = [(12, 0, 5), (0, 0, 0), (1, 12, 7), (12, 12, 12)]  # of each rank in each step
NUM_RANKS = 3  # 3, 3 and 2 experts


def cases_of(name: str, tokens: list[tuple[int, ...]] = TOKENS) -> list[Case]:
    cfg, input_dtype = MATRIX[name]
    return [
        make_case(cfg, NUM_RANKS, seed, tokens=counts, input_dtype=input_dtype, skew=0.3 * seed)
        for seed, counts in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def wrong(poisoned: None) -> dict[str, list[str]]:
    """Name → what was wrong, over all ranks. One set of processes runs the whole matrix."""
    found: dict[str, list[str]] = {name: [] for name in MATRIX}
    for of_rank in mc.run(_matrix, NUM_RANKS, timeout_s=240):
        for name, texts in of_rank.items():
            found[name] += texts
    return found


@pytest.mark.parametrize("name", MATRIX)
def test_b13_every_layout_and_dtype_equals_the_reference(
    name: str, wrong: dict[str, list[str]]
) -> None:
    """Changing numbers of tokens, 0 on some ranks and on all."""
    assert not wrong[name]


def _matrix(group: mc.Group) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = {}
    for seed, (name, (cfg, _)) in enumerate(MATRIX.items()):
        cases = cases_of(name)
        schedule = random_schedule(np.random.default_rng(seed), len(cases), cfg.in_flight)
        with mc.MoeComm(cfg, group) as comm:
            walk(comm, cases, schedule, report=wrong.setdefault(name, []).append)
    return wrong


TORCH = (
    "batched-receiver-bf16-lines",
    "grouped-sender-fp16-flags",
    "rank-fp32-lines",
    "grouped-receiver-fp8-given-flags",
)


def test_torch_tensors_in_and_out() -> None:
    mc.run(_torch, NUM_RANKS, timeout_s=120)


def _torch(group: mc.Group) -> None:
    for name in TORCH:
        cases = cases_of(name)
        schedule = random_schedule(np.random.default_rng(0), len(cases), 2)
        with mc.MoeComm(MATRIX[name][0], group) as comm:
            walk(comm, cases, schedule, convert=to_torch)


@pytest.mark.parametrize("name", ["batched", "sender", "replicas", "flags"])
def test_many_handles_out_of_order_with_delays(name: str) -> None:
    """Three in flight, received and sent back in another order on every rank, a third of them
    closed without being combined, every rank late at random; T changes, 0 included."""
    mc.run(_many, 4, name, timeout_s=120)


LONG = {
    "batched": mc.MoeConfig(**BASE, in_flight=3),
    "sender": mc.MoeConfig(**BASE, in_flight=3, layout="grouped", reduce="sender"),
    "replicas": mc.MoeConfig(**BASE, in_flight=3, layout="rank", replicas=2),
    "flags": mc.MoeConfig(**BASE, in_flight=3, wire="flags"),
}


def _many(group: mc.Group, name: str) -> None:
    cfg = LONG[name]
    cases = [make_case(cfg, group.size, seed, skew=0.2 * (seed % 3)) for seed in range(8)]
    common = random_schedule(np.random.default_rng(1), 60, cfg.in_flight, closed=0.3)
    own = np.random.default_rng(group.rank + 2)

    def pause() -> None:
        if own.random() < 0.1:
            time.sleep(own.exponential(0.003))

    with mc.MoeComm(cfg, group) as comm:
        walk(comm, cases, for_rank(common, own), pause=pause)
