"""Processes on GPUs over the nvlink transport, compared bit for bit with the reference.

Several ranks may share a GPU: the driver then gives each process its turn, so that a step takes
milliseconds, but everything about it is real.
"""

from __future__ import annotations

import signal
from typing import Any

import gpu_graphs
import gpu_ranks
import pytest
from threads import run_threads

import moecomm as mc
from moecomm.run import outcomes

BASE: dict[str, Any] = {
    "num_experts": 32,
    "top_k": 4,
    "hidden": 512,
    "max_tokens": 64,
    "num_sms": 16,
}
FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "float8_e4m3fn", "scale_block": 128}
BF16 = mc.MoeConfig(**BASE)
Configs = list[tuple[mc.MoeConfig, str | None]]
CONFIGS: Configs = [
    (BF16, None),
    (mc.MoeConfig(**BASE, wire="flags"), None),
    (mc.MoeConfig(**BASE, reduce="sender"), None),
    (mc.MoeConfig(**BASE, layout="grouped", expert_alignment=16, in_flight=1), None),
    (mc.MoeConfig(**FP8, layout="grouped"), "bfloat16"),
    (mc.MoeConfig(**FP8, layout="rank"), None),
    (mc.MoeConfig(**{**FP8, "hidden": 7168, "max_tokens": 32}, wire="flags"), "bfloat16"),
    # Enough blocks for one a row (flags); so few that a warp takes two pieces at a time (lines).
    (mc.MoeConfig(**{**BASE, "num_sms": 64}, wire="flags"), None),
    (mc.MoeConfig(**{**BASE, "hidden": 2048, "num_sms": 8}), None),
]
BOTH_WIRES: Configs = [(mc.MoeConfig(**BASE, wire=wire), None) for wire in ("lines", "flags")]
SHORT = mc.MoeConfig(**BASE, timeout_s=1.0)
# Some 400 MiB: the rounding of allocations and the driver's own tables are far below 5 % of it.
LARGE = mc.MoeConfig(
    num_experts=64, top_k=8, hidden=4096, max_tokens=1024, layout="rank", in_flight=8, num_sms=32
)

one_gpu = pytest.mark.gpu
two_gpus = pytest.mark.gpus(2)


def run(fn: Any, num_ranks: int, *args: Any, timeout_s: float = 280.0) -> list[Any]:
    return mc.run(fn, num_ranks, *args, device="cuda", timeout_s=timeout_s)


# A test for each way in which ranks lie on GPUs: number of ranks, device of all (None: by rank).
PLACES = [
    pytest.param(2, "cuda:0", marks=one_gpu, id="2-on-1"),
    pytest.param(2, None, marks=two_gpus, id="2-on-2"),
]
MANY = [
    *PLACES,
    pytest.param(4, "cuda:0", marks=one_gpu, id="4-on-1"),
    pytest.param(8, None, marks=two_gpus, id="8-on-2"),
]


@pytest.mark.parametrize(("num_ranks", "device"), MANY)
def test_every_configuration_equals_the_reference(num_ranks: int, device: str | None) -> None:
    run(gpu_ranks.exchange_all, num_ranks, CONFIGS, 6, device)


@two_gpus
def test_a_thousand_rounds_with_random_delays() -> None:
    run(gpu_ranks.exchange_all, 2, BOTH_WIRES, 1000)


@one_gpu
def test_rounds_with_random_delays_on_a_shared_gpu() -> None:
    run(gpu_ranks.exchange_all, 2, BOTH_WIRES, 150, "cuda:0")


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_c04_streams_without_order(num_ranks: int, device: str | None) -> None:
    run(gpu_ranks.overlap, num_ranks, BF16, 50, device)


# ---- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "device"),
    [*MANY[:3], pytest.param(4, None, marks=two_gpus, id="4-on-2")],
)
def test_c02_a_killed_peer_is_a_timeout_and_the_process_goes_on(
    num_ranks: int, device: str | None
) -> None:
    """All others name it, whoever of them got its last words."""
    ends = outcomes(
        gpu_ranks.die_or_survive, num_ranks, SHORT, device, device="cuda", timeout_s=120
    )
    assert ends[1].exit_code == -signal.SIGKILL
    for end in (*ends[:1], *ends[2:]):
        assert end.error is None, end.error
        phase, peer, waited = end.value
        assert peer == 1
        assert phase in ("dispatch_send", "dispatch_recv", "combine_recv")
        assert waited < 10


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_a_silent_peer_is_a_timeout_and_all_ranks_go_on(num_ranks: int, device: str | None) -> None:
    first, silent = run(gpu_ranks.be_silent, num_ranks, SHORT, device)
    assert first == ("dispatch_recv", 1)
    assert silent is None


@two_gpus
def test_d18_too_little_memory_on_one_rank() -> None:
    cfg = mc.MoeConfig(num_experts=64, top_k=8, hidden=7168, max_tokens=4096, timeout_s=60)
    (kind, text), (short_kind, short_text) = run(gpu_ranks.run_out_of_memory, 2, cfg)
    assert short_kind == "OutOfMemory"
    assert "GPU 1 has" in short_text
    assert kind == "TransportError"
    assert "rank 1" in text
    assert "OutOfMemory" in text


# ---- memory and devices ----------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_d11_d12_opening_and_closing(num_ranks: int, device: str | None) -> None:
    run(gpu_ranks.open_and_close, num_ranks, BF16, 20, device)


@pytest.mark.parametrize(
    ("num_ranks", "device"),
    [pytest.param(1, "cuda:0", marks=one_gpu, id="1"), *PLACES],
)
def test_h07_memory_is_what_is_stated(num_ranks: int, device: str | None) -> None:
    found = run(gpu_ranks.measure_memory, num_ranks, LARGE, device)
    sharing = num_ranks if device is not None else 1
    for taken, stated, grown in found:
        assert stated > 100 << 20
        assert abs(taken - sharing * stated) < 0.05 * sharing * stated, (taken, stated)
        assert grown < 16 << 20


@two_gpus
@pytest.mark.parametrize("form", ["numbers", "uuids"])
def test_f02_each_process_sees_one_gpu(form: str) -> None:
    (found,) = run(gpu_ranks.uuids, 1)
    names = ["1", "0"]
    if form == "uuids":
        names = [f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}" for u in reversed(found)]
    assert run(gpu_ranks.see_one_gpu, 2, names, CONFIGS[:2]) == [found[1], found[0]]


@two_gpus
def test_f03_another_device_is_current() -> None:
    run(gpu_ranks.beside_the_current_device, 2, BF16)


@two_gpus
def test_threads_on_two_gpus() -> None:
    def one(group: mc.Group) -> None:
        gpu_ranks.exchange_all(group, CONFIGS[:3], 20, f"cuda:{group.rank}")

    run_threads(one, 2, device="cuda")


# ---- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 4, 5], ids=["bf16", "fp8-cast-grouped", "fp8-rank"])
@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_e02_the_first_call_is_captured(num_ranks: int, device: str | None, which: int) -> None:
    cfg, input_dtype = CONFIGS[which]
    run(gpu_graphs.first_call_is_captured, num_ranks, cfg, input_dtype, device)


@pytest.mark.parametrize("cfg", [cfg for cfg, _ in BOTH_WIRES], ids=["lines", "flags"])
@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_e04_graphs_of_several_sizes(num_ranks: int, device: str | None, cfg: mc.MoeConfig) -> None:
    run(gpu_graphs.sizes_interleave, num_ranks, cfg, 60, device)


@pytest.mark.parametrize("cfg", [cfg for cfg, _ in BOTH_WIRES], ids=["lines", "flags"])
@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_num_tokens_on_the_device(num_ranks: int, device: str | None, cfg: mc.MoeConfig) -> None:
    run(gpu_graphs.tokens_on_the_device, num_ranks, cfg, device)


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_e05_pieces_replayed_on_another_stream(num_ranks: int, device: str | None) -> None:
    run(gpu_graphs.pieces_across_streams, num_ranks, BF16, device)


@one_gpu
def test_e01_a_refused_argument_does_not_spoil_a_capture() -> None:
    run(gpu_graphs.host_errors_leave_a_capture_alone, 2, BF16, "cuda:0")
