"""Rows that say which token they are, and what the tests compare with.

Random data hides a swapped row; these do not. A row's columns are digits of its token's global
number, shifted by the column, so that every token's row differs from every other's and from
itself moved by a column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecomm.dtypes import numpy_dtype

Array = NDArray[Any]

BASE = 251  # prime; every digit is exact in bfloat16 (8 significant bits)
FP8_BASE = 13  # prime; every digit is exact in float8_e4m3fn (4 significant bits)


def global_ids(group: int, num_tokens: int, max_tokens: int) -> Array:
    """Numbers of a source group's tokens, distinct over all groups. ``[T]``."""
    return group * max_tokens + np.arange(num_tokens)


def payload(tokens: Array, hidden: int, dtype: str = "bfloat16") -> Array:
    """``[T]`` global numbers → ``[T, H]``: two base-251 digits, alternating, shifted by column.

    Distinct up to 63,000 tokens from ``hidden=2`` on; exact in bfloat16, float16 and float32.
    """
    return _digits(np.asarray(tokens), hidden, BASE, 2).astype(numpy_dtype(dtype))


def payload_fp8(tokens: Array, hidden: int) -> Array:
    """The same in float8_e4m3fn, bit-exact: four base-13 digits, distinct up to 28,561 tokens
    from ``hidden=4`` on."""
    digits = _digits(np.asarray(tokens), hidden, FP8_BASE, 4)
    return digits.astype(np.float32).astype(numpy_dtype("float8_e4m3fn"))


def token_of(row: Array) -> int:
    """The token that a ``payload`` row (``hidden >= 2``) says it is; the rest is not looked at."""
    low, high = int(float(row[0])), int(float(row[1]))
    return low % BASE + BASE * ((high - 1) % BASE)


def _digits(tokens: Array, hidden: int, base: int, num_digits: int) -> Array:
    column = np.arange(hidden)
    return (tokens[:, None] // base ** (column % num_digits) + column) % base


def random_topk(
    rng: np.random.Generator,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    dropped: float = 0.0,
    repeats: bool = False,
    dtype: str = "int32",
) -> Array:
    """Routing ``[T, K]``: distinct experts in random order (or, with ``repeats``, any), of which
    a share ``dropped`` is -1."""
    if repeats:
        idx = rng.integers(0, num_experts, (num_tokens, top_k))
    else:
        order = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)
        idx = order[:, :top_k]
    idx = np.where(rng.random(idx.shape) < dropped, -1, idx)
    return idx.astype(dtype)


def random_weights(rng: np.random.Generator, topk_idx: Array, dtype: str = "float32") -> Array:
    """Weights ``[T, K]`` in (0, 1]; NaN where the slot is dropped, which nobody may read."""
    weights = 1.0 - rng.random(topk_idx.shape)
    return np.where(topk_idx < 0, np.nan, weights).astype(np.float32).astype(numpy_dtype(dtype))


def assert_same_bits(actual: Array, expected: Array, what: str) -> None:
    """Equal shape, dtype and bytes (NaN equals the same NaN, 0.0 differs from -0.0)."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, want {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, want {expected.dtype}"
    word = np.dtype(f"u{actual.dtype.itemsize}")
    same = np.ascontiguousarray(actual).view(word) == np.ascontiguousarray(expected).view(word)
    if not same.all():
        first = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.size} elements differ, first at {first}: "
            f"{actual[first]!r}, want {expected[first]!r}"
        )
