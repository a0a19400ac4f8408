"""GPUs that pretend to be on several machines: bytes between them go through pinned memory of the
host and a transfer engine over tcp. Bit for bit as the reference, eager and replayed."""

from __future__ import annotations

import os
import signal
from typing import Any

import gpu_bounce
import gpu_graphs
import gpu_ranks
import pytest

import moecomm as mc
from moecomm.run import outcomes
from moecomm.transport.proxy.mover import PATIENCE_S

BASE: dict[str, Any] = {
    "num_experts": 32,
    "top_k": 4,
    "hidden": 512,
    "max_tokens": 64,
    "num_sms": 16,
    "timeout_s": 20.0,
}
FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "float8_e4m3fn", "scale_block": 128}
BF16 = mc.MoeConfig(**BASE)
CONFIGS: list[tuple[mc.MoeConfig, str | None]] = [
    (BF16, None),
    (mc.MoeConfig(**BASE, reduce="sender"), None),
    (mc.MoeConfig(**BASE, layout="grouped", expert_alignment=16, in_flight=1), None),
    (mc.MoeConfig(**FP8, layout="grouped"), "bfloat16"),
    (mc.MoeConfig(**FP8, layout="rank"), None),
    (mc.MoeConfig(**{**FP8, "hidden": 7168, "max_tokens": 128}), "bfloat16"),
    (mc.MoeConfig(**{**BASE, "num_sms": 64}), None),  # a block a row
]
LARGE = mc.MoeConfig(**{**BASE, "hidden": 7168, "max_tokens": 128, "num_sms": None})
SHORT = mc.MoeConfig(**{**BASE, "timeout_s": 2.0})
one_gpu, two_gpus = pytest.mark.gpu, pytest.mark.gpus(2)
NODES = [  # ranks, how many a node; whether all are on one GPU
    pytest.param((2, 1, True), marks=one_gpu, id="2-nodes-on-1"),
    pytest.param((4, 2, True), marks=one_gpu, id="2-nodes-of-2-on-1"),
    pytest.param((2, 1, False), marks=two_gpus, id="2-nodes"),
    pytest.param((4, 2, False), marks=two_gpus, id="2-nodes-of-2"),
]


@pytest.fixture(params=NODES)
def num_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    ranks, size, together = request.param
    monkeypatch.setenv("MOECOMM_NODE_SIZE", str(size))
    monkeypatch.setenv("MOECOMM_FABRIC", "tcp")
    if together:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.split(",")[0])
    return int(ranks)


def run(fn: Any, num_ranks: int, *args: Any, timeout_s: float = 280.0) -> list[Any]:
    return mc.run(fn, num_ranks, *args, device="cuda", transport="efa", timeout_s=timeout_s)


def test_every_configuration_equals_the_reference(num_ranks: int) -> None:
    run(gpu_ranks.exchange_all, num_ranks, CONFIGS, 12)


def test_replicas_on_different_nodes(num_ranks: int) -> None:
    configs = [(mc.MoeConfig(**BASE, replicas=2, reduce=r), None) for r in ("receiver", "sender")]
    run(gpu_ranks.exchange_all, num_ranks, configs, 12)


def test_three_hundred_rounds_with_random_delays(num_ranks: int) -> None:
    run(gpu_ranks.exchange_all, num_ranks, [(BF16, None)], 300)


def test_streams_without_order(num_ranks: int) -> None:
    run(gpu_ranks.overlap, num_ranks, BF16, 50)


@pytest.mark.parametrize("which", [0, 3], ids=["bf16", "fp8-cast-grouped"])
def test_the_first_call_is_captured(num_ranks: int, which: int) -> None:
    cfg, input_dtype = CONFIGS[which]
    run(gpu_graphs.first_call_is_captured, num_ranks, cfg, input_dtype, None)


def test_graphs_of_several_sizes(num_ranks: int) -> None:
    run(gpu_graphs.sizes_interleave, num_ranks, BF16, 60, None)


def test_num_tokens_on_the_device(num_ranks: int) -> None:
    run(gpu_graphs.tokens_on_the_device, num_ranks, BF16, None)


def test_pieces_replayed_on_another_stream(num_ranks: int) -> None:
    run(gpu_graphs.pieces_across_streams, num_ranks, BF16, None)


@pytest.mark.parametrize("in_line", [False, True], ids=["beside", "in-line"])
def test_work_between_the_halves(
    num_ranks: int, in_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECOMM_BOUNCE_IN_LINE", str(int(in_line)))
    run(gpu_bounce.between, num_ranks, LARGE, 60)


def test_a_late_peer_keeps_nobodys_device_waiting(num_ranks: int) -> None:
    """A stream that waits for what it sends gives up, and the receiving half does the work."""
    for waited in run(gpu_bounce.come_late, num_ranks, BF16):
        assert waited < 2 * PATIENCE_S + 1


def test_nothing_waits_once_a_rank_has_given_up(num_ranks: int) -> None:
    """The device is free, with a handle under way, and processes end that close nothing."""
    for peer, waited in run(gpu_bounce.give_up, num_ranks, SHORT):
        assert peer == 1
        assert waited < 10


@pytest.mark.parametrize("fault", ["stop", "forge"])
def test_a_stopped_mover_and_a_failed_write(num_ranks: int, fault: str) -> None:
    """Rank 1's. In time, named on every rank, which all go on."""
    seen = run(gpu_bounce.break_down, num_ranks, SHORT, fault)
    assert max(waited for _, _, waited, _ in seen) < 10
    assert max(closing for _, _, _, closing in seen) < 10
    if fault == "stop":
        assert [peer for peer, _, _, _ in seen] == [1] * num_ranks
        assert "nobody has looked after" in seen[1][1]
        return
    whom, why, _, _ = seen[1]
    assert f"rank 1: a write to rank {whom} by lo (tcp) failed" in why
    assert {peer for peer, _, _, _ in seen} <= {1, whom}


def test_a_process_ends_while_a_stream_waits(num_ranks: int) -> None:
    assert run(gpu_bounce.leave, num_ranks, BF16, timeout_s=60) == list(range(num_ranks))


def test_opening_and_closing(num_ranks: int) -> None:
    run(gpu_ranks.open_and_close, num_ranks, BF16, 5, None)


def test_a_killed_peer_is_named_on_every_node(num_ranks: int) -> None:
    ends = outcomes(
        gpu_ranks.die_or_survive, num_ranks, SHORT, None,
        device="cuda", transport="efa", timeout_s=120,
    )  # fmt: skip
    assert ends[1].exit_code == -signal.SIGKILL
    for end in (*ends[:1], *ends[2:]):
        assert end.error is None, end.error
        phase, peer, waited = end.value
        assert peer == 1
        assert phase in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
        assert waited < 10
