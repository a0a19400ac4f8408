"""What dispatch refuses, each with the argument, its value and the rule; and what they accept."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fake_gpu import GpuArray
from payload import assert_same_bits, payload, payload_fp8

from moecomm.arrays import ArrayView, as_numpy
from moecomm.checks_dispatch import DispatchInputs, check_dispatch_inputs
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError

BF16 = np.dtype(ml_dtypes.bfloat16)


def config(**fields: Any) -> MoeConfig:
    return MoeConfig(**{"num_experts": 8, "top_k": 2, "hidden": 40, "max_tokens": 8, **fields})


def fp8_config(**fields: Any) -> MoeConfig:
    return config(**{"dispatch_dtype": "float8_e4m3fn", "scale_block": 16, **fields})


def good(cfg: MoeConfig, num_tokens: int = 3) -> dict[str, Any]:
    tokens = np.arange(num_tokens)
    fp8 = cfg.dispatch_dtype == "float8_e4m3fn"
    scale = np.ones((num_tokens, cfg.num_scales), np.float32)
    return {
        "x": payload_fp8(tokens, 40) if fp8 else payload(tokens, 40, cfg.dispatch_dtype),
        "topk_idx": np.arange(2 * num_tokens, dtype=np.int32).reshape(num_tokens, 2),
        "topk_weights": np.ones((num_tokens, 2), np.float32),
        "x_scale": scale if cfg.num_scales else None,
        "num_tokens": np.array([num_tokens], np.int32),
    }


def check(cfg: MoeConfig, *, device: Any = "cpu", **changes: Any) -> DispatchInputs:
    return check_dispatch_inputs(cfg, **{**good(cfg), **changes}, device=device)


def bits(found: ArrayView | None) -> np.ndarray:
    assert found is not None
    return as_numpy(found)


def test_good_inputs_are_taken_in_place() -> None:
    cfg = fp8_config()
    given = good(cfg)
    found = check_dispatch_inputs(cfg, **given, device="cpu")
    assert (found.num_rows, found.kind, found.x_code) == (3, "numpy", 3)
    for name, array in given.items():
        taken = getattr(found, name)
        assert taken.pointer == array.ctypes.data
        assert_same_bits(as_numpy(taken), array, name)


def test_optional_inputs_stay_none() -> None:
    found = check(config(), topk_weights=None, num_tokens=None)
    assert (found.topk_weights, found.x_scale, found.num_tokens) == (None, None, None)


def test_zero_tokens() -> None:
    for cfg in (config(), fp8_config()):
        found = check_dispatch_inputs(cfg, **good(cfg, 0), device="cpu")
        assert found.num_rows == 0
        assert found.x.shape == (0, 40)


# ---- tokens and shapes -----------------------------------------------------------------------


def test_too_many_tokens_and_unequal_lengths_are_different_errors() -> None:
    cfg = config()
    with pytest.raises(ConfigError, match=r"x has 9 tokens: must be at most max_tokens=8"):
        check_dispatch_inputs(cfg, **good(cfg, 9), device="cpu")
    idx = good(cfg, 4)["topk_idx"]
    with pytest.raises(ConfigError, match=r"x has 3 tokens and topk_idx 4") as caught:
        check(cfg, topk_idx=idx)
    assert "max_tokens" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x", (3, 41)),
        ("x", (120,)),
        ("x", (3, 40, 1)),
        ("topk_idx", (3, 3)),
        ("topk_idx", (6,)),
        ("topk_weights", (3, 1)),
        ("topk_weights", (2, 2)),
        ("x_scale", (3, 2)),
        ("x_scale", (3, 4)),
        ("x_scale", (3,)),
        ("num_tokens", (2,)),
        ("num_tokens", ()),
    ],
)
def test_wrong_shapes_are_named_with_the_right_one(name: str, shape: tuple[int, ...]) -> None:
    cfg = fp8_config()
    array = np.zeros(shape, good(cfg)[name].dtype)
    with pytest.raises(ConfigError) as caught:
        check(cfg, **{name: array})
    assert f"{name} has shape {shape}: must be [" in str(caught.value)
    assert not isinstance(caught.value, DtypeError)


def test_last_scale_block_is_counted_though_partial() -> None:
    assert bits(check(fp8_config()).x_scale).shape == (3, 3)  # 40 columns in blocks of 16
    with pytest.raises(ConfigError, match=r"x_scale has shape \(3, 2\): must be \[3, 3\]"):
        check(fp8_config(), x_scale=np.ones((3, 2), np.float32))


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32", "float64", "int8"])
def test_x_has_exactly_the_dispatch_dtype(wanted: str, given: str) -> None:
    x = np.zeros((3, 40), np.dtype(getattr(ml_dtypes, given, given)))
    if given == wanted:
        assert check(config(dispatch_dtype=wanted), x=x).x.dtype == wanted
        return
    with pytest.raises(DtypeError, match=rf"x has dtype {given}: must be {wanted}"):
        check(config(dispatch_dtype=wanted), x=x)


@pytest.mark.parametrize(
    ("given", "code"), [("bfloat16", 0), ("float16", 1), ("float32", 2), ("float8_e4m3fn", 3)]
)
@pytest.mark.parametrize("block", [16, None])
def test_fp8_dispatch_casts_what_is_not_fp8(given: str, code: int, block: int | None) -> None:
    cfg = fp8_config(scale_block=block)
    x = np.zeros((3, 40), np.dtype(getattr(ml_dtypes, given, given)))
    scale = np.ones((3, 3), np.float32)
    needs_scale = code == 3 and block is not None
    assert check(cfg, x=x, x_scale=scale if needs_scale else None).x_code == code
    with pytest.raises(ConfigError, match="x_scale"):
        check(cfg, x=x, x_scale=None if needs_scale else scale)


def test_fp8_of_another_kind_is_refused() -> None:
    with pytest.raises(DtypeError, match="x has dtype float8_e5m2"):
        check(fp8_config(), x=np.zeros((3, 40), ml_dtypes.float8_e5m2))
    with pytest.raises(DtypeError, match="x has dtype uint8"):
        check(fp8_config(), x=np.zeros((3, 40), np.uint8))
    with pytest.raises(ConfigError, match="x_scale given"):
        check(config(), x_scale=np.ones((3, 3), np.float32))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_both_index_types_are_kept(dtype: str) -> None:
    idx = good(config())["topk_idx"].astype(dtype)
    found = check(config(), topk_idx=idx).topk_idx
    assert found.dtype == dtype
    assert found.pointer == idx.ctypes.data


@pytest.mark.parametrize("dtype", ["int16", "uint32", "uint64", "float32", "bool", ">i4"])
def test_other_index_types_are_type_errors(dtype: str) -> None:  # A05
    with pytest.raises(TypeError, match=r"topk_idx has dtype .*: must be int32 or int64"):
        check(config(), topk_idx=np.zeros((3, 2), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_become_float32(dtype: str) -> None:
    weights = (np.arange(6).reshape(3, 2) / 3).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    assert_same_bits(
        bits(check(config(), topk_weights=weights).topk_weights), weights.astype("f4"), "weights"
    )


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
def test_other_weights_are_refused(dtype: str) -> None:
    with pytest.raises(DtypeError, match=rf"topk_weights has dtype {dtype}"):
        check(config(), topk_weights=np.ones((3, 2), dtype))


def test_scales_and_num_tokens_have_one_type() -> None:
    with pytest.raises(DtypeError, match="x_scale has dtype bfloat16: must be float32"):
        check(fp8_config(), x_scale=np.ones((3, 3), BF16))
    with pytest.raises(DtypeError, match="num_tokens has dtype int64: must be int32"):
        check(config(), num_tokens=np.array([3]))
    with pytest.raises(DtypeError, match="num_tokens is a int"):
        check(config(), num_tokens=3)


def test_lists_are_not_arrays() -> None:
    with pytest.raises(DtypeError, match="topk_idx is a list"):
        check(config(), topk_idx=[[0, 1]] * 3)


# ---- strides, devices, gradients -------------------------------------------------------------


def test_strided_inputs_give_the_same_rows() -> None:
    cfg, given = fp8_config(), good(fp8_config())
    wide_idx = np.repeat(given["topk_idx"], 2, axis=1)
    found = check(
        cfg,
        x=np.concatenate([given["x"]] * 2, axis=1)[:, :40],
        topk_idx=wide_idx[:, ::2],
        topk_weights=np.broadcast_to(np.array([[0.25, 0.5]], np.float32), (3, 2)),
    )
    assert_same_bits(bits(found.x), given["x"], "x")
    assert found.x.strides_bytes == (80, 1)
    assert_same_bits(bits(found.topk_idx), given["topk_idx"], "topk_idx")
    assert bits(found.topk_weights).tolist() == [[0.25, 0.5]] * 3
    transposed = np.ascontiguousarray(given["x"].T).T
    assert_same_bits(bits(check(cfg, x=transposed).x), given["x"], "x.t()")


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_scales_of_either_majorness(num_tokens: int) -> None:
    cfg = fp8_config()
    given = good(cfg, num_tokens)
    given["x_scale"] = np.arange(3 * num_tokens, dtype=np.float32).reshape(num_tokens, 3)
    by_row = check_dispatch_inputs(cfg, **given, device="cpu").x_scale
    columns = {**given, "x_scale": np.ascontiguousarray(given["x_scale"].T).T}
    by_column = check_dispatch_inputs(cfg, **columns, device="cpu").x_scale
    assert by_column is not None
    assert by_column.pointer == columns["x_scale"].ctypes.data  # in place
    assert_same_bits(bits(by_column).copy(), bits(by_row), "x_scale")


def test_arrays_on_the_wrong_device_are_named() -> None:  # B12
    for name in ("x", "topk_idx", "topk_weights", "num_tokens"):
        on_gpu = {n: GpuArray(a) for n, a in good(config()).items() if n != name and a is not None}
        with pytest.raises(ConfigError, match=rf"^{name} is on cpu: must be on cuda:0"):
            check_on_fake_gpu({**good(config()), **on_gpu})
    first, other = GpuArray(good(config())["x"]), GpuArray(good(config())["topk_idx"], index=1)
    with pytest.raises(ConfigError, match="topk_idx is on cuda:1: must be on cuda:0"):
        check_on_fake_gpu({**good(config()), "x": first, "topk_idx": other})
    with pytest.raises(ConfigError, match="x is on cuda:0: must be on cpu"):
        check(config(), x=first)


def check_on_fake_gpu(inputs: dict[str, Any]) -> DispatchInputs:
    return check_dispatch_inputs(config(dispatch_dtype="float16"), **inputs, device=("cuda", 0))


def test_gpu_arrays_that_need_a_copy_are_refused() -> None:
    given = {n: GpuArray(a) for n, a in good(config()).items() if a is not None}
    given["x_scale"] = None
    assert check_on_fake_gpu(given).kind == "cupy"
    wide = np.zeros((3, 4), np.int32)[:, ::2]
    with pytest.raises(ConfigError, match=r"topk_idx has shape \(3, 2\) and strides \(16, 8\)"):
        check_on_fake_gpu({**given, "topk_idx": GpuArray(wide)})


def test_torch_inputs_answer_in_torch() -> None:
    x = torch.zeros(3, 40, dtype=torch.bfloat16)
    idx = torch.zeros(3, 2, dtype=torch.int64)
    found = check(config(), x=x, topk_idx=idx)
    assert (found.kind, found.x.pointer, found.topk_idx.dtype) == ("torch", x.data_ptr(), "int64")
    weights = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(ConfigError, match="topk_weights requires grad"):
        check(config(), x=x, topk_idx=idx, topk_weights=weights)


def test_sender_reduction_needs_weights_at_dispatch() -> None:
    with pytest.raises(ConfigError, match=r"topk_weights=None: reduce='sender'"):
        check(config(reduce="sender"), topk_weights=None)
    assert check(config(reduce="sender")).topk_weights is not None
