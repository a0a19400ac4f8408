"""Processes on GPUs over NVSHMEM, compared bit for bit with the reference: by stores to peers'
heaps, and by puts alone."""

from __future__ import annotations

import signal
from typing import Any

import gpu_graphs
import gpu_nvshmem
import gpu_ranks
import pytest
from test_gpu_nvlink import BASE, BF16, CONFIGS, SHORT

import moecomm as mc
from moecomm.run import outcomes

pytestmark = [pytest.mark.gpus(2), pytest.mark.archive]

CAPPED = mc.MoeConfig(**BASE, layout="grouped", max_recv_tokens=2048)
REPLICAS = mc.MoeConfig(**BASE, layout="rank", replicas=2)
LARGE = mc.MoeConfig(
    num_experts=64, top_k=8, hidden=7168, max_tokens=1024, layout="rank",
    dispatch_dtype="float8_e4m3fn", scale_block=128,
)  # fmt: skip


@pytest.fixture(params=["stores", "puts"])
def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How kernels reach peers."""
    monkeypatch.setenv("MOECOMM_NVSHMEM_NO_POINTERS", str(int(request.param == "puts")))
    return str(request.param)


def run(fn: Any, num_ranks: int, *args: Any, timeout_s: float = 280.0) -> list[Any]:
    return mc.run(fn, num_ranks, *args, device="cuda", transport="nvshmem", timeout_s=timeout_s)


def test_what_kernels_do(peers: str) -> None:
    found = run(gpu_nvshmem.kind_of_peers, 2, BF16)
    assert found == [{"stores": "stores", "puts": "nvshmem puts"}[peers]] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_configuration_equals_the_reference(num_ranks: int, peers: str) -> None:
    run(gpu_ranks.exchange_all, num_ranks, [*CONFIGS, (CAPPED, None), (LARGE, "bfloat16")], 6)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_several_ranks_a_gpu(num_ranks: int, peers: str) -> None:
    run(gpu_ranks.exchange_all, num_ranks, [*CONFIGS[:4], (REPLICAS, None)], 4)


def test_rounds_with_random_delays(peers: str) -> None:
    run(gpu_ranks.exchange_all, 2, [(BF16, None), CONFIGS[5]], 500)


def test_streams_without_order(peers: str) -> None:
    run(gpu_ranks.overlap, 2, BF16, 50)


@pytest.mark.usefixtures("puts")
def test_puts_of_every_size() -> None:
    run(gpu_nvshmem.chunks, 2, BF16, [1, 2, 3, 8, 64], 6)


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_NVSHMEM_NO_POINTERS", "1")


def test_opening_and_closing(peers: str) -> None:
    run(gpu_ranks.open_and_close, 2, BF16, 12, None)


def test_finalized_and_started_again(peers: str) -> None:
    run(gpu_nvshmem.start_again, 2, BF16, 3)


def test_two_communicators_at_once(peers: str) -> None:
    run(gpu_nvshmem.two_at_once, 2, [BF16, CONFIGS[5][0]], 20)


def test_a_killed_peer_is_a_timeout(peers: str) -> None:
    ends = outcomes(
        gpu_nvshmem.die_or_survive, 2, SHORT, device="cuda", transport="nvshmem", timeout_s=120
    )
    assert ends[1].exit_code == -signal.SIGKILL
    assert ends[0].error is None, ends[0].error
    phase, peer, waited = ends[0].value
    assert peer == 1
    assert phase in ("dispatch_send", "dispatch_recv", "combine_recv")
    assert waited < 10


def test_another_version_of_the_host_library_is_everybodys_error() -> None:
    first, second = run(gpu_nvshmem.another_host_library, 2, BF16)
    assert second.startswith("TransportUnavailable")
    assert first.startswith("TransportError: rank 1 failed in nvshmem")
    for text in (first, second):
        assert "headers 3.4.5 and archive 3.4.5" in text
        assert "host library 3.8.0" in text


@pytest.mark.parametrize("which", [0, 4, 5], ids=["bf16", "fp8-cast-grouped", "fp8-rank"])
def test_the_first_call_is_captured(which: int, peers: str) -> None:
    cfg, input_dtype = CONFIGS[which]
    run(gpu_graphs.first_call_is_captured, 2, cfg, input_dtype, None)


def test_graphs_of_several_sizes(peers: str) -> None:
    run(gpu_graphs.sizes_interleave, 2, BF16, 60, None)


def test_num_tokens_on_the_device(peers: str) -> None:
    run(gpu_graphs.tokens_on_the_device, 2, BF16, None)
