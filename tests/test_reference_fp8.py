"""The fp8 block cast: rounding against the format's own table, scales by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from payload import assert_same_bits, payload_fp8

from moecomm import reference
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


def e4m3_value(byte: int) -> float:
    """The number that a non-negative byte stands for: 4 exponent bits (bias 7), 3 mantissa bits."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = [e4m3_value(b) for b in range(0x7F)]  # 0x7f is NaN


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_every_fp8_number_and_every_middle_rounds_to_nearest_even() -> None:
    assert POSITIVE[-1] == 448
    values = np.array(POSITIVE, np.float32)
    q, scale = reference.quantize(values[None], None)
    assert scale is None
    assert q.dtype == FP8
    assert q.view(np.uint8)[0].tolist() == list(range(0x7F))
    middle = (values[1:] + values[:-1]) / 2  # exact in float32
    for x, want in (
        (middle, [b if b % 2 == 0 else b + 1 for b in range(0x7E)]),
        (np.nextafter(middle, np.float32(0)), list(range(0x7E))),
        (np.nextafter(middle, np.float32(1e9)), list(range(1, 0x7F))),
    ):
        assert reference.quantize(x[None], None)[0].view(np.uint8)[0].tolist() == want
        negative = reference.quantize(-x[None], None)[0].view(np.uint8)[0]
        assert negative.tolist() == [0x80 | byte for byte in want]


def test_out_of_range_is_clamped_and_nan_is_one_byte() -> None:
    values = row(449, 464, 1e30, np.inf, -449, -np.inf, np.nan, -np.nan, -0.0)
    q, _ = reference.quantize(values, None)
    assert q.view(np.uint8)[0].tolist() == [0x7E] * 4 + [0xFE] * 2 + [0x7F, 0x7F, 0x80]


def test_scale_is_the_largest_over_448() -> None:
    q, scale = reference.quantize(row(896, -1792, 448, 0, 1, 2, 4, -3.5), 4)
    assert scale is not None
    assert scale.dtype == np.float32
    assert scale.tolist() == [[4, np.float32(4) / np.float32(448)]]
    assert q.astype(np.float32).tolist() == [[224, -448, 112, 0, 112, 224, 448, -384]]  # 392 → 384


def test_last_block_may_be_partial() -> None:
    values = np.full((2, 200), 448, np.float32)
    values[:, 128:] = 896
    q, scale = reference.quantize(values, 128)
    assert scale is not None
    assert scale.tolist() == [[1, 2], [1, 2]]
    assert (q.astype(np.float32) == 448).all()


def test_scale_and_inverse_are_separate_divisions() -> None:
    # 267 * (448/356) is 336.00003 in float32, above the middle of 320 and 352. 267 / scale is
    # the middle itself (336, ties to 320), and 267 * (1/scale) is 335.99997.
    q, scale = reference.quantize(row(356, 267), 16)
    assert scale is not None
    assert scale[0, 0] == np.float32(356) / np.float32(448)
    assert q.astype(np.float32).tolist() == [[448, 352]]


def test_zero_block_has_the_smallest_scale() -> None:
    q, scale = reference.quantize(np.zeros((1, 16), np.float32), 16)
    assert scale is not None
    assert scale[0, 0] == np.float32(1e-30) / np.float32(448)
    assert not q.view(np.uint8).any()


def test_nan_does_not_enter_the_scale_and_stays_nan() -> None:
    q, scale = reference.quantize(row(np.nan, 448, -np.nan, 224), 16)
    assert scale is not None
    assert scale.tolist() == [[1]]
    assert q.view(np.uint8)[0].tolist() == [0x7F, 0x7E, 0x7F, 0x76]


@pytest.mark.parametrize("pow2", [False, True])
def test_infinity_takes_its_block_with_it(pow2: bool) -> None:
    values = np.full((1, 32), 448, np.float32)
    values[0, 3] = -np.inf
    q, scale = reference.quantize(values, 16, pow2)
    assert scale is not None
    assert scale.tolist() == [[np.inf, 1]]
    assert q.view(np.uint8)[0, 3] == 0x7F  # inf * 0
    assert not q.view(np.uint8)[0, :3].any()
    assert (q.astype(np.float32)[0, 16:] == 448).all()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448, 1), (449, 2), (447, 1), (224, 0.5), (225, 1), (1, 2.0**-8), (448 * 2.0**20, 2.0**20)],
)
def test_power_of_two_scales_are_rounded_up_and_exact_ones_stay(amax: float, scale: float) -> None:
    q, got = reference.quantize(row(amax, amax / 2), 16, pow2=True)
    assert got is not None
    assert got.tolist() == [[scale]]
    want = np.array([[amax / scale, amax / 2 / scale]], np.float32).astype(FP8)
    assert_same_bits(q, want, "q")


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dequantised_rows_are_within_half_an_fp8_step(
    rng: np.random.Generator, pow2: bool, dtype: str
) -> None:
    values = (rng.normal(size=(9, 200)) * 10.0 ** rng.integers(-3, 4, (9, 1))).astype(np.float32)
    values = values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    q, scale = reference.quantize(values, 64, pow2)
    assert scale is not None
    exact = values.astype(np.float32)
    spread = np.repeat(scale, 64, axis=1)[:, :200]
    if pow2:
        assert (np.frexp(scale)[0] == 0.5).all()
    blocks = [np.abs(exact[:, b : b + 64]).max(axis=1) for b in range(0, 200, 64)]
    assert (scale >= np.stack(blocks, axis=1) / np.float32(448)).all()
    error = np.abs(reference.dequantize(q, scale, 64) - exact)
    # half a step: 2^-4 of the value, or half of the smallest number 2^-9 below the normal range
    assert (error <= np.maximum(np.abs(exact) * 2.0**-4, spread * 2.0**-10) * 1.0001).all()


def test_dequantize_without_scales_and_mismatch() -> None:
    q = payload_fp8(np.arange(3), 8)
    assert_same_bits(reference.dequantize(q, None, None), q.astype(np.float32), "rows")
    with pytest.raises(ConfigError, match="both or neither"):
        reference.dequantize(q, None, 16)
    with pytest.raises(ConfigError, match="both or neither"):
        reference.dequantize(q, np.ones((3, 1), np.float32), None)


def config(**fields: Any) -> MoeConfig:
    base = {"num_experts": 2, "top_k": 1, "hidden": 24, "max_tokens": 2, "scale_block": 16}
    return MoeConfig(**{**base, "dispatch_dtype": "float8_e4m3fn", **fields})


IDX = [np.array([[1], [0]], np.int32)]


@pytest.mark.parametrize("layout", ["batched", "grouped", "rank"])
def test_fp8_rows_travel_with_their_scales(layout: Any) -> None:
    x = payload_fp8(np.array([5, 6]), 24)
    scale = np.array([[1, 2], [3, 4]], np.float32)
    (got,) = reference.dispatch(config(layout=layout), 1, [x], IDX, x_scales=[scale])
    assert got.x_scale is not None
    first = {"batched": (0, 0), "grouped": (0,), "rank": (1,)}[layout]
    assert_same_bits(got.x[first], x[1], "row of token 1")
    assert got.x_scale[first].tolist() == [3, 4]
    assert got.x_scale.shape == (*got.x.shape[:-1], 2)
    unused = got.src_rank < 0
    assert not got.x_scale[unused].any()


def test_pad_rows_have_zero_scales() -> None:
    cfg = config(layout="grouped", expert_alignment=4)
    x = np.ones((2, 24), BF16)
    (got,) = reference.dispatch(cfg, 1, [x], IDX)
    assert got.x_scale is not None
    assert got.x_scale[1:4].tolist() == [[0, 0]] * 3
    assert not got.x[1:4].view(np.uint8).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_other_input_is_cast_on_the_way(dtype: str) -> None:
    x = np.array([[896] * 16 + [1] * 8] * 2, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    (got,) = reference.dispatch(config(layout="grouped", scale_pow2=True), 1, [x], IDX)
    assert got.x.dtype == FP8
    assert got.x_scale is not None
    assert got.x_scale[0].tolist() == [2, 2.0**-8]
    assert got.x.astype(np.float32)[0].tolist() == [448] * 16 + [256] * 8
    (plain,) = reference.dispatch(config(layout="grouped", scale_block=None), 1, [x], IDX)
    assert plain.x_scale is None
    assert plain.x.astype(np.float32)[0].tolist() == [448] * 16 + [1] * 8


def test_scales_are_given_exactly_when_they_mean_something() -> None:
    fp8, scale = payload_fp8(np.arange(2), 24), np.ones((2, 2), np.float32)
    with pytest.raises(ConfigError, match="x_scale"):
        reference.dispatch(config(), 1, [fp8], IDX)
    with pytest.raises(ConfigError, match="x_scale"):
        reference.dispatch(config(scale_block=None), 1, [fp8], IDX, x_scales=[scale])
    with pytest.raises(ConfigError, match="x_scale"):
        reference.dispatch(config(), 1, [np.ones((2, 24), BF16)], IDX, x_scales=[scale])
    with pytest.raises(ConfigError, match=r"x_scale number 0 has shape \(2, 1\)"):
        reference.dispatch(config(), 1, [fp8], IDX, x_scales=[scale[:, :1]])
