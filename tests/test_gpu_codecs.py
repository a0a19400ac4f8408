"""Codecs on a real GPU: bit for bit what plain Python says, and what the built-in cast gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_ranks
import numpy as np
import pytest
from codec_examples import ALL, Int8PerToken, OffsetBinary, Steps16, Truncated
from exchange import Case, make_case
from gpu_exchange import OnGpu, on_device
from threads import run_threads

import moecomm as mc
from moecomm.cuda_driver import attribute
from moecomm.kernels.codec_check import check_on_gpu

BASE: dict[str, Any] = {
    "num_experts": 32, "top_k": 4, "hidden": 512, "max_tokens": 64, "num_sms": 16,
}  # fmt: skip
LARGE: dict[str, Any] = {**BASE, "hidden": 7168, "max_tokens": 32, "num_sms": 32}
FP8: dict[str, Any] = {"dispatch_dtype": "float8_e4m3fn", "scale_block": 128}

one_gpu = pytest.mark.gpu
two_gpus = pytest.mark.gpus(2)
CASES: dict[str, tuple[mc.MoeConfig, int, str | None]] = {
    "int8-batched": (mc.MoeConfig(**BASE, codec=Int8PerToken), 2, None),
    "int8-grouped-decoded": (
        mc.MoeConfig(**BASE, codec=Int8PerToken, decode_to="bfloat16", layout="grouped"), 2, None
    ),
    "int8-rank-from-fp32": (
        mc.MoeConfig(**BASE, codec=Int8PerToken, decode_to="float16", layout="rank"), 3, "float32"
    ),
    "int8-odd": (
        mc.MoeConfig(**{**BASE, "hidden": 203}, codec=Int8PerToken, decode_to="float32"), 2, None
    ),
    "int8-large": (mc.MoeConfig(**LARGE, codec=Int8PerToken, decode_to="bfloat16"), 2, None),
    "offset-binary": (mc.MoeConfig(**BASE, codec=OffsetBinary, decode_to="bfloat16"), 2, None),
    "truncated": (mc.MoeConfig(**BASE, codec=Truncated, layout="rank"), 2, "float32"),
    "steps": (mc.MoeConfig(**BASE, codec=Steps16, decode_to="bfloat16"), 2, "float16"),
    "fp8-a-token": (mc.MoeConfig(**BASE, codec=mc.codecs.fp8(None), reduce="sender"), 4, None),
}  # fmt: skip


@one_gpu
@pytest.mark.parametrize("name", ALL)
def test_functions_compiled_for_the_gpu_are_pythons(name: str) -> None:
    major = attribute(0, "COMPUTE_CAPABILITY_MAJOR")
    minor = attribute(0, "COMPUTE_CAPABILITY_MINOR")
    check_on_gpu(ALL[name], 0, f"sm_{major}{minor}")


@one_gpu
@pytest.mark.parametrize("wire", ["auto", "flags"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_gpu_get_the_references_bits(name: str, wire: str) -> None:
    cfg, num_ranks, input_dtype = CASES[name]
    cfg = dataclasses.replace(cfg, wire=wire)
    cases = [make_case(cfg, num_ranks, seed, input_dtype=input_dtype) for seed in range(3)]
    run_threads(_steps, num_ranks, cfg, cases, device="cuda")


@one_gpu
@pytest.mark.parametrize("wire", ["lines", "flags"])
@pytest.mark.parametrize("pow2", [False, True])
def test_fp8_as_a_codec_gives_the_built_in_casts_bits(pow2: bool, wire: str) -> None:
    """The same inputs through both kernels; each is compared with the other's reference."""
    cast = mc.MoeConfig(**BASE, **FP8, scale_pow2=pow2, wire=wire, layout="grouped")
    codec = mc.MoeConfig(**BASE, codec=mc.codecs.fp8(128, pow2), wire=wire, layout="grouped")
    cases = [make_case(cast, 2, seed, input_dtype="bfloat16") for seed in range(3)]
    for cfg in (codec, cast):
        same = [dataclasses.replace(case, cfg=cfg) for case in cases]
        run_threads(_steps, 2, cfg, same, device="cuda")


@two_gpus
def test_processes_on_two_gpus() -> None:
    configs = [
        (dataclasses.replace(cfg, wire=wire), input_dtype)
        for cfg, _, input_dtype in CASES.values()
        for wire in ("auto", "flags")
    ]
    mc.run(_exchange_all, 2, configs, device="cuda", timeout_s=280.0)


def _exchange_all(group: mc.Group, configs: list[tuple[mc.MoeConfig, str | None]]) -> None:
    """Of this module, which the ranks import: so they know the codecs by name."""
    gpu_ranks.exchange_all(group, configs, 6)


@one_gpu
def test_a_wrong_codec_is_noticed_on_the_gpu() -> None:
    wrong = mc.Codec(
        "Wrong", "int8", None, _truncating, Int8PerToken.decode, Int8PerToken.scale,
        Int8PerToken.inverse,
    )  # fmt: skip
    cfg = mc.MoeConfig(**BASE, codec=Int8PerToken)
    case = make_case(cfg, 2, tokens=[40, 50])
    for codec, equal in ((Int8PerToken, True), (wrong, False)):
        chosen = dataclasses.replace(cfg, codec=codec)
        assert run_threads(_is_equal, 2, chosen, case, device="cuda") == [equal, equal]


def _truncating(value, inverse):
    return int(max(-127.0, min(127.0, value * inverse)))


def _is_equal(group: mc.Group, cfg: mc.MoeConfig, case: Case) -> bool:
    """Whether what arrives is as the case says; ranks part when all have looked."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()), mc.MoeComm(cfg, group) as comm:
        given = OnGpu(case, group.rank, on_device(comm))
        torch.cuda.synchronize()  # of all ranks of this process: none may wait for another yet
        group.barrier(60)
        recv = comm.dispatch_recv(given.send(comm))
        given.combine(comm, recv.handle)
        try:
            given.compare_received(recv)
            equal = True
        except AssertionError:
            equal = False
        group.barrier(60)
        return equal


def _steps(group: mc.Group, cfg: mc.MoeConfig, cases: list[Case]) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()), mc.MoeComm(cfg, group) as comm:
        where = on_device(comm)
        given = [OnGpu(case, group.rank, where) for case in cases]
        torch.cuda.synchronize()  # of all ranks of this process: none may wait for another yet
        group.barrier(60)
        rng = np.random.default_rng(group.rank)
        for step in range(4 * len(cases)):
            torch.cuda._sleep(int(rng.integers(0, 50_000)))
            given[step % len(cases)].run(comm)
        comm.check()
        group.barrier(60)
