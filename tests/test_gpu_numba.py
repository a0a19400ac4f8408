"""The kernels in Python on real GPUs: what the CUDA C++ ones are asked, in short.

Cold, numba and the linker take half a minute before the first launch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gpu_graphs
import gpu_ranks
import pytest
import test_gpu_direct as direct
import test_gpu_nvlink as nvlink
from exchange import make_case
from test_gpu_nvlink import PLACES, one_gpu, run, two_gpus
from threads import run_threads

import moecomm as mc

FLAGS = mc.MoeConfig(**nvlink.BASE, wire="flags")
SHORT = dataclasses.replace(FLAGS, timeout_s=1.0)
CONFIGS: nvlink.Configs = [
    (dataclasses.replace(cfg, wire="flags"), given) for cfg, given in nvlink.CONFIGS
]


@pytest.fixture(autouse=True)
def python_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every communicator of these tests runs, in processes too."""
    monkeypatch.setenv("MOECOMM_KERNELS", "numba")


@one_gpu
@pytest.mark.parametrize("name", direct.CASES)
def test_many_steps_equal_the_reference(name: str) -> None:
    """Ranks are threads that share a GPU."""
    direct.test_many_steps_equal_the_reference(name, "flags")


@one_gpu
@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_a_cap_that_is_enough(layout: Any) -> None:
    cfg = mc.MoeConfig(**nvlink.BASE, layout=layout, max_recv_tokens=128)
    cases = [make_case(cfg, 2, 0, tokens=(12, 12))]
    run_threads(direct._steps, 2, cfg, cases, 3, device="cuda")


@one_gpu
def test_two_hundred_rounds_with_random_delays() -> None:
    cases = [make_case(FLAGS, 4, seed) for seed in range(4)]
    run_threads(direct._steps, 4, FLAGS, cases, 50, device="cuda")


@one_gpu
def test_a_silent_peer_times_out_on_the_ranks_that_wait() -> None:
    direct.test_a_silent_peer_times_out_on_the_ranks_that_wait()


@one_gpu
def test_an_expert_out_of_range_is_reported_and_skipped() -> None:
    direct.test_an_expert_out_of_range_is_reported_and_skipped()


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_processes(num_ranks: int, device: str | None) -> None:
    run(gpu_ranks.exchange_all, num_ranks, CONFIGS, 6, device)


@two_gpus
def test_a_thousand_rounds_with_random_delays() -> None:
    run(gpu_ranks.exchange_all, 2, CONFIGS[:1], 1000)


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_streams_without_order(num_ranks: int, device: str | None) -> None:
    run(gpu_ranks.overlap, num_ranks, FLAGS, 50, device)


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_a_peer_that_is_silent_and_then_all_go_on(num_ranks: int, device: str | None) -> None:
    first, silent = run(gpu_ranks.be_silent, num_ranks, SHORT, device)
    assert first == ("dispatch_recv", 1)
    assert silent is None


@pytest.mark.parametrize("which", [0, 4, 5], ids=["bf16", "fp8-cast-grouped", "fp8-rank"])
@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_the_first_call_is_captured(num_ranks: int, device: str | None, which: int) -> None:
    cfg, input_dtype = CONFIGS[which]
    run(gpu_graphs.first_call_is_captured, num_ranks, cfg, input_dtype, device)


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_graphs_of_several_sizes(num_ranks: int, device: str | None) -> None:
    run(gpu_graphs.sizes_interleave, num_ranks, FLAGS, 60, device)


@pytest.mark.parametrize(("num_ranks", "device"), PLACES)
def test_num_tokens_on_the_device(num_ranks: int, device: str | None) -> None:
    run(gpu_graphs.tokens_on_the_device, num_ranks, FLAGS, device)


@one_gpu
def test_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's: records from the last to the first."""
    import test_change_a_kernel as guide

    mine = tmp_path / "my_recv.py"
    mine.write_text(guide.blocks("python")[0])
    monkeypatch.setenv("MOECOMM_KERNELS", str(mine))
    cases: list[Any] = [make_case(FLAGS, 2, seed) for seed in range(3)]
    run_threads(direct._steps, 2, FLAGS, cases, 5, device="cuda")
