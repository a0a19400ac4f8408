"""A GPU whose multiprocessors others want, too; and the largest batches."""

from __future__ import annotations

from typing import Any

import gpu_room
import pytest

import moecomm as mc

BASE: dict[str, Any] = {"num_experts": 32, "top_k": 4, "hidden": 2048, "max_tokens": 128}
CONFIGS = {
    "lines": mc.MoeConfig(**BASE),
    "flags": mc.MoeConfig(**BASE, wire="flags"),
    "many-experts": mc.MoeConfig(**{**BASE, "num_experts": 512, "top_k": 8}, layout="grouped"),
}
one_gpu, two_gpus = pytest.mark.gpu, pytest.mark.gpus(2)


def run(fn: Any, num_ranks: int, *args: Any, timeout_s: float = 120.0) -> None:
    mc.run(fn, num_ranks, *args, device="cuda", timeout_s=timeout_s)


@two_gpus
@pytest.mark.parametrize("name", CONFIGS)
def test_c05_nccl_in_another_order_on_every_rank(name: str) -> None:
    run(gpu_room.gather_in_another_order, 2, CONFIGS[name], 100)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=one_gpu, id="1"), pytest.param(2, marks=two_gpus, id="2-on-2")],
)
def test_c09_fewer_multiprocessors_than_expected(num_ranks: int, name: str) -> None:
    """Kernels of another stream hold all but the room of two."""
    run(gpu_room.exchange_beside, num_ranks, CONFIGS[name], 20, 4)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=one_gpu, id="1"), pytest.param(2, marks=two_gpus, id="2-on-2")],
)
def test_c07_every_size_to_131072_tokens_and_back(num_ranks: int) -> None:
    run(gpu_room.sweep, num_ranks)
