"""The CUDA C++ kernels on a real GPU: several ranks share it, each a thread with its own stream.

What the GPU gives is compared bit for bit with the reference, as everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import test_cast_extremes as cast_extremes
from exchange import Case, make_case, used_rows
from payload import assert_same_bits
from threads import run_threads

import moecomm as mc
from moecomm.dtypes import numpy_dtype

pytestmark = pytest.mark.gpu

# Ranks that share a GPU must fit on it together, or those that wait keep the others out.
BASE: dict[str, Any] = {
    "num_experts": 32,
    "top_k": 4,
    "hidden": 512,
    "max_tokens": 64,
    "num_sms": 16,
}
FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "float8_e4m3fn", "scale_block": 128}
CASES: dict[str, tuple[mc.MoeConfig, int, str | None]] = {
    "bf16-batched-2": (mc.MoeConfig(**BASE), 2, None),
    "bf16-grouped-4": (mc.MoeConfig(**BASE, layout="grouped", expert_alignment=16), 4, None),
    "bf16-rank-3": (mc.MoeConfig(**BASE, layout="rank"), 3, None),
    "bf16-sender-4": (mc.MoeConfig(**BASE, reduce="sender"), 4, None),
    "bf16-replicas-4": (mc.MoeConfig(**BASE, replicas=2, layout="grouped"), 4, None),
    "fp8-given-2": (mc.MoeConfig(**FP8, layout="grouped"), 2, None),
    "fp8-from-bf16-2": (mc.MoeConfig(**FP8), 2, "bfloat16"),
    "fp8-from-fp16-2": (mc.MoeConfig(**FP8, layout="rank"), 2, "float16"),
    "fp8-from-fp32-pow2-2": (mc.MoeConfig(**FP8, scale_pow2=True), 2, "float32"),
    # Enough blocks for one a row (flags); so few that a warp takes two pieces at a time (lines).
    "many-blocks-2": (mc.MoeConfig(**{**BASE, "num_sms": 64}, layout="rank"), 2, None),
    "few-blocks-3": (mc.MoeConfig(**{**BASE, "hidden": 2048, "num_sms": 8}), 3, None),
    "fp32-odd-3": (
        mc.MoeConfig(
            num_sms=16,
            num_experts=7,
            top_k=3,
            hidden=203,
            max_tokens=37,
            dispatch_dtype="float32",
            combine_dtype="float32",
            layout="grouped",
        ),
        3,
        None,
    ),
    "fp16-top32-2": (
        mc.MoeConfig(
            num_sms=16,
            num_experts=100,
            top_k=32,
            hidden=72,
            max_tokens=33,
            dispatch_dtype="float16",
            combine_dtype="float16",
        ),
        2,
        None,
    ),
    "large-2": (
        mc.MoeConfig(
            num_sms=64,
            num_experts=256,
            top_k=8,
            hidden=7168,
            max_tokens=128,
            dispatch_dtype="float8_e4m3fn",
            scale_block=128,
        ),
        2,
        "bfloat16",
    ),
}


@pytest.mark.parametrize("wire", ["auto", "flags"])
@pytest.mark.parametrize("name", CASES)
def test_many_steps_equal_the_reference(name: str, wire: str) -> None:
    cfg, num_ranks, input_dtype = CASES[name]
    cfg = dataclasses.replace(cfg, wire=wire)
    cases = [
        make_case(cfg, num_ranks, seed, input_dtype=input_dtype, skew=0.3 * (seed % 2))
        for seed in range(4)
    ]
    run_threads(_steps, num_ranks, cfg, cases, 3, device="cuda")


@pytest.mark.parametrize("wire", ["lines", "flags"])
def test_a_thousand_rounds_with_random_delays(wire: str) -> None:
    cfg = mc.MoeConfig(**BASE, wire=wire)
    cases = [make_case(cfg, 4, seed) for seed in range(5)]
    run_threads(_steps, 4, cfg, cases, 200, device="cuda")


@pytest.mark.parametrize("dtype", cast_extremes.DTYPES)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("how", cast_extremes.HOW)
def test_extreme_values_are_cast_to_the_references_bits(how: str, pow2: bool, dtype: str) -> None:
    run_threads(_cast, 1, how, pow2, cast_extremes.extremes(dtype), device="cuda")


def test_a_silent_peer_times_out_on_the_ranks_that_wait() -> None:
    cfg = mc.MoeConfig(**BASE, timeout_s=0.5)
    case = make_case(cfg, 3, 0)
    errors = run_threads(_until_timeout, 3, cfg, case, device="cuda")
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, mc.PeerTimeout)
        assert (error.peer, error.phase) == (1, "dispatch_recv")


def test_an_expert_out_of_range_is_reported_and_skipped() -> None:
    cfg = mc.MoeConfig(**BASE)
    (message,) = run_threads(_bad_expert, 1, cfg, device="cuda")
    assert "topk_idx[1, 2]=32" in message


def _steps(group: mc.Group, cfg: mc.MoeConfig, cases: list[Case], rounds: int) -> None:
    import torch

    rng = np.random.default_rng(group.rank)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), mc.MoeComm(cfg, group) as comm:
        ready = [_to_gpu(case, group.rank) for case in cases]
        for step in range(rounds * len(cases)):
            case, given = cases[step % len(cases)], ready[step % len(cases)]
            torch.cuda._sleep(int(rng.integers(0, 50_000)))
            handle = comm.dispatch_send(*given[:4])
            recv = comm.dispatch_recv(handle)
            torch.cuda._sleep(int(rng.integers(0, 50_000)))
            comm.combine_send(given[4], handle)
            out = comm.combine_recv(handle, None if case.weights_at_dispatch else given[5])
            stream.synchronize()
            comm.check()
            _compare(case, group.rank, recv, out)


def _cast(group: mc.Group, how: str, pow2: bool, x: np.ndarray[Any, Any]) -> None:
    import torch

    with cast_extremes.make_comm(group, how, pow2, x.shape[1]) as comm:
        recv = comm.dispatch(_tensor(x), torch.zeros(len(x), 1, dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
        q, scale = mc.reference.quantize(x, cast_extremes.BLOCK, pow2)
        assert scale is not None
        assert_same_bits(_to_numpy(recv.x)[0, : len(x)], q, "rows")
        assert_same_bits(_to_numpy(recv.x_scale)[0, : len(x)], scale, "scales")


def _compare(case: Case, rank: int, recv: mc.Received, out: Any) -> None:
    expected = case.recv[rank]
    used = used_rows(case, rank)
    assert_same_bits(_to_numpy(recv.counts), expected.counts, "counts")
    assert_same_bits(_to_numpy(recv.num_rows), expected.num_rows, "num_rows")
    for name in ("x", "x_scale", "src_rank", "src_token", "topk_weights", "topk_idx"):
        want, have = getattr(expected, name), getattr(recv, name)
        assert (want is None) == (have is None), name
        if want is not None:
            assert_same_bits(_to_numpy(have)[used], want[used], name)
    assert_same_bits(_to_numpy(out), case.outs[rank], "out")


def _to_gpu(case: Case, rank: int) -> list[Any]:
    scale = None if case.x_scales is None else case.x_scales[rank]
    weights = case.weights[rank]
    at_dispatch = weights if case.weights_at_dispatch else None
    arrays = (case.xs[rank], case.idxs[rank], at_dispatch, scale, case.ys[rank], weights)
    return [None if array is None else _tensor(array) for array in arrays]


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    name = array.dtype.name
    words = np.ascontiguousarray(array)
    if name in ("bfloat16", "float8_e4m3fn"):
        words = words.view(np.int16 if name == "bfloat16" else np.uint8)
    return torch.from_numpy(words).cuda().view(getattr(torch, name))


def _to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float8_e4m3fn"):
        return tensor.cpu().numpy()
    words = tensor.view(torch.int16 if name == "bfloat16" else torch.uint8).cpu().numpy()
    return words.view(numpy_dtype(name))


def _until_timeout(group: mc.Group, cfg: mc.MoeConfig, case: Case) -> Exception | None:
    import torch

    given = _to_gpu(case, group.rank)
    # Kernels are loaded before time counts: a rank that is late is somebody's culprit, too.
    _steps(group, dataclasses.replace(cfg, timeout_s=60.0), [case], 1)
    with torch.cuda.stream(torch.cuda.Stream()), mc.MoeComm(cfg, group) as comm:
        if group.rank == 1:
            group.barrier(30)  # its memory must outlive the others' last look at it
            return None
        comm.dispatch_recv(comm.dispatch_send(*given[:4]))
        torch.cuda.current_stream().synchronize()
        group.barrier(30)
        with pytest.raises(mc.PeerTimeout) as caught:
            comm.check()
        return caught.value


def _bad_expert(group: mc.Group, cfg: mc.MoeConfig) -> str:
    import torch

    with mc.MoeComm(cfg, group) as comm:
        idx = torch.tensor([[0, 1, 2, 3], [4, 5, 32, 6]], device="cuda")
        x = torch.ones(2, cfg.hidden, dtype=torch.bfloat16, device="cuda")
        recv = comm.dispatch(x, idx, torch.ones(2, 4, device="cuda"))
        torch.cuda.synchronize()
        assert recv.counts.sum().item() == 7
        with pytest.raises(mc.ConfigError) as caught:
            comm.check()
        return str(caught.value)
