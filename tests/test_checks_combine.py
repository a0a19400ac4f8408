"""What combine refuses, each with the argument, its value and the rule; and what it accepts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fake_gpu import GpuArray
from payload import assert_same_bits, payload

from moecomm.arrays import ArrayView, as_numpy
from moecomm.checks_combine import check_combine_inputs, check_combine_weights, check_out
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError

BF16 = np.dtype(ml_dtypes.bfloat16)


def config(**fields: Any) -> MoeConfig:
    return MoeConfig(**{"num_experts": 8, "top_k": 2, "hidden": 40, "max_tokens": 8, **fields})


def bits(found: ArrayView | None) -> np.ndarray:
    assert found is not None
    return as_numpy(found)


def test_y_has_the_shape_of_what_was_received() -> None:
    y = payload(np.arange(24), 40).reshape(4, 6, 40)
    found = check_combine_inputs(config(), y, (4, 6, 40), "cpu")
    assert (found.shape, found.strides_bytes) == ((24, 40), (80, 2))
    assert found.pointer == y.ctypes.data
    for wrong in (y[:3], y.reshape(24, 40), y[:, :, :39]):
        with pytest.raises(ConfigError, match=r"y has shape .*: must be \[4, 6, 40\]"):
            check_combine_inputs(config(), wrong, (4, 6, 40), "cpu")
    with pytest.raises(DtypeError, match="y has dtype bfloat16: must be float32"):
        check_combine_inputs(config(combine_dtype="float32"), y, (4, 6, 40), "cpu")
    with pytest.raises(ConfigError, match="y is on cpu: must be on cuda:1"):
        check_combine_inputs(config(), y, (4, 6, 40), ("cuda", 1))


@pytest.mark.parametrize("shape", [(4, 6, 40), (1, 6, 40), (4, 1, 40), (0, 6, 40), (24, 40)])
@pytest.mark.parametrize("how", ["plain", "wide", "gaps", "transposed", "experts-apart"])
def test_y_rows_come_in_order_whatever_the_strides(shape: tuple[int, ...], how: str) -> None:
    rows = int(np.prod(shape[:-1]))
    y = payload(np.arange(rows), 40).reshape(shape)
    wide = np.repeat(y, 2, axis=-1)
    if how == "wide":
        wide[..., :40] = y
        y_given = wide[..., :40]
    elif how == "gaps":
        y_given = wide[..., ::2]
    elif how == "transposed":
        y_given = np.ascontiguousarray(y.swapaxes(0, -1)).swapaxes(0, -1)
    elif how == "experts-apart":
        y_given = np.repeat(y, 2, axis=0)[::2]
    else:
        y_given = y
    found = check_combine_inputs(config(), y_given, shape, "cpu")
    assert_same_bits(as_numpy(found), y.reshape(rows, 40), how)


def test_gpu_experts_that_lie_apart_are_refused() -> None:
    cfg = config(combine_dtype="float16")
    y = np.zeros((8, 6, 40), np.float16)
    assert check_combine_inputs(cfg, GpuArray(y), (8, 6, 40), ("cuda", 0)).shape == (48, 40)
    with pytest.raises(ConfigError, match="y has strides .*one after the other"):
        check_combine_inputs(cfg, GpuArray(y[::2]), (4, 6, 40), ("cuda", 0))


def weights_at_combine(cfg: MoeConfig, weights: Any, *, before: bool) -> ArrayView | None:
    return check_combine_weights(cfg, weights, 3, "cpu", given_at_dispatch=before)


def test_weights_are_given_once_somewhere() -> None:
    weights = np.ones((3, 2), np.float32)
    assert bits(weights_at_combine(config(), weights, before=False)).shape == (3, 2)
    assert bits(weights_at_combine(config(), weights.astype(BF16), before=True)).dtype == "f4"
    assert weights_at_combine(config(), None, before=True) is None
    assert weights_at_combine(config(layout="rank"), None, before=False) is None
    assert weights_at_combine(config(reduce="sender"), None, before=True) is None
    with pytest.raises(ConfigError, match="topk_weights=None: must be given to dispatch or to com"):
        weights_at_combine(config(), None, before=False)
    with pytest.raises(ConfigError, match="layout='rank'"):
        weights_at_combine(config(layout="rank"), weights, before=False)
    with pytest.raises(ConfigError, match="reduce='sender'"):
        weights_at_combine(config(reduce="sender"), weights, before=True)
    with pytest.raises(ConfigError, match=r"topk_weights has shape \(2, 2\): must be \[3, 2\]"):
        weights_at_combine(config(), weights[:2], before=False)


# ---- out -------------------------------------------------------------------------------------


def out(array: Any, *, accumulate: Any = False, **fields: Any) -> ArrayView | None:
    return check_out(config(**fields), array, 3, accumulate, "cpu")


def test_out_is_written_where_it_lies() -> None:
    array = np.zeros((3, 80), BF16)[:, 20:60]
    found = out(array)
    assert found is not None
    assert (found.pointer, found.strides_bytes) == (array.ctypes.data, (160, 2))
    tensor = torch.zeros(3, 40, dtype=torch.bfloat16)
    taken = out(tensor, accumulate=True)
    assert taken is not None
    assert (taken.pointer, taken.kind) == (tensor.data_ptr(), "torch")
    assert out(None) is None
    assert check_out(config(), np.zeros((0, 40), BF16), 0, False, "cpu") is not None


def test_out_that_cannot_be_written_is_refused() -> None:
    array = np.zeros((6, 80), BF16)
    frozen = np.zeros((3, 40), BF16)
    frozen.flags.writeable = False
    for wrong, message in (
        (array[:3], r"out has shape \(3, 80\): must be \[3, 40\]"),
        (array[:3, ::2], r"out has shape .*results are written in place"),
        (array[2::-1, :40], "results are written in place"),
        (np.zeros(241, np.uint8)[1:].view(BF16).reshape(3, 40), "in place"),
        (frozen, "out is read-only"),
        (torch.zeros(1, 40, dtype=torch.bfloat16).expand(3, 40), "out has a row stride of 0"),
        (torch.zeros(3, 40, dtype=torch.bfloat16, requires_grad=True), "out requires grad"),
        (np.zeros((3, 40), np.float32), "out has dtype float32: must be bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            out(wrong)


def test_accumulate_needs_an_out() -> None:
    with pytest.raises(ConfigError, match="accumulate=True, out=None"):
        out(None, accumulate=True)
    with pytest.raises(DtypeError, match="accumulate=1"):
        out(np.zeros((3, 40), BF16), accumulate=1)
