"""Casting to fp8 what is infinite, no number, zero, or at either end of its type.

Everything that casts gives the reference's bits: the kernels in CUDA C++ (with either wire), those
in Python, and the cast as a codec.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from payload import assert_same_bits

import moecomm as mc
from moecomm.dtypes import numpy_dtype
from moecomm.emulator import simulate

BLOCK = 64  # columns, of four lanes: three of them hear of an extreme value from another
ZERO, MINUS_ZERO, NAN = 0x00, 0x80, 0x7F  # fp8
INF = float("inf")
BASE: dict[str, Any] = {"num_experts": 1, "top_k": 1, "max_tokens": 3, "timeout_s": 20.0}
Array = np.ndarray[Any, Any]


def extremes(dtype: str) -> Array:
    """``[3, H]``: the same blocks in each row, their values from the left, from the right, and with
    the other sign. The last block is partial."""
    limits = ml_dtypes.finfo(numpy_dtype(dtype))
    most, least = float(limits.max), float(limits.smallest_subnormal)
    rest = [1.0, -1.0, 448.0, -3.0] * (BLOCK // 4)
    blocks = [
        [INF, *rest[1:]],
        [INF, -INF, *rest[2:]],
        [INF, np.nan, 0.0, -0.0, least, -least, most, -most, *rest[8:]],
        [INF] * BLOCK,
        [np.nan, *rest[1:]],
        [np.nan] * BLOCK,
        [0.0] * BLOCK,
        [-0.0, least, -least, *[0.0] * (BLOCK - 3)],
        [least, *rest[1:]],
        [most, -most, least, *rest[3:]],
        [most] * BLOCK,
        rest,  # beside the last one: finite
        [INF, 1.0, -1.0, *rest[3:16]],
    ]
    left = [value for block in blocks for value in block]
    right = [value for block in blocks for value in reversed(block)]
    return np.array([left, right, [-value for value in left]], numpy_dtype(dtype))


DTYPES = ("bfloat16", "float16", "float32")
HOW = ("lines", "flags", "numba", "codec")


def make_comm(group: mc.Group, how: str, pow2: bool, hidden: int) -> mc.MoeComm:
    fields: dict[str, Any] = {"wire": "flags" if how in ("flags", "numba") else "lines"}
    if how == "codec":
        fields["codec"] = mc.codecs.fp8(BLOCK, pow2)
    else:
        fields |= {"dispatch_dtype": "float8_e4m3fn", "scale_block": BLOCK, "scale_pow2": pow2}
    cfg = mc.MoeConfig(**BASE, **fields, hidden=hidden)
    return mc.MoeComm(cfg, group, kernels="numba" if how == "numba" else "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_extreme_values_are_cast_to_the_references_bits(how: str, pow2: bool, dtype: str) -> None:
    x = extremes(dtype)
    q, scale = simulate(_cast, 1, how, pow2, x)[0]
    want, want_scale = mc.reference.quantize(x, BLOCK, pow2)
    assert want_scale is not None
    assert_same_bits(scale, want_scale, "scales")
    assert_same_bits(q, want, "rows")
    # By hand, for a block that holds an infinite value: 0 and NaN.
    assert scale[:2, [0, 1, 2, 3, -1]].tolist() == [[INF] * 5] * 2
    assert q.view(np.uint8)[0, :4].tolist() == [NAN, MINUS_ZERO, ZERO, MINUS_ZERO]
    assert q.view(np.uint8)[1, -3:].tolist() == [MINUS_ZERO, ZERO, NAN]
    assert (q.view(np.uint8)[0, 3 * BLOCK : 4 * BLOCK] == NAN).all()


def _cast(group: mc.Group, how: str, pow2: bool, x: Array) -> tuple[Array, Array]:
    with make_comm(group, how, pow2, x.shape[1]) as comm:
        recv = comm.dispatch(x, np.zeros((len(x), 1), np.int32))
        assert recv.src_token[0, : len(x)].tolist() == list(range(len(x)))
        return recv.x[0, : len(x)].copy(), recv.x_scale[0, : len(x)].copy()
