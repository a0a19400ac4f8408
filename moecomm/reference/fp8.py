"""The fp8 block cast, in numpy: the specification that kernels follow bit for bit.

Every operation is one float32 operation, rounded once, in the order written here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.dtypes import numpy_dtype
from moecomm.errors import ConfigError

FP8_MAX: Final = np.float32(448.0)  # largest float8_e4m3fn
SMALLEST_AMAX: Final = np.float32(1e-30)  # an all-zero block still has a scale that divides
NAN_BYTE: Final = 0x7F

Array = NDArray[Any]
Floats = NDArray[np.float32]


def quantize(x: Array, scale_block: int | None, pow2: bool = False) -> tuple[Array, Floats | None]:
    """Cast rows to fp8, with one scale for every ``scale_block`` columns.

    For every block: ``amax = max(|x|)`` without NaN, at least 1e-30; ``scale = amax / 448``;
    ``q = x * (448 / amax)``. With ``pow2``, the scale is rounded up to a power of two (one that
    is exact stays) and ``q = x * (1 / scale)``. ``q`` is clamped to ±448 and rounded to nearest
    even; NaN becomes the byte 0x7f. Without ``scale_block``, ``q`` is ``x``.

    Args:
        x: ``[T, H]`` bfloat16, float16 or float32.

    Returns:
        ``q [T, H]`` float8_e4m3fn and ``scale [T, ceil(H / scale_block)]`` float32, or ``None``.
    """
    values = np.asarray(x).astype(np.float32)
    if scale_block is None:
        return _to_fp8(values), None
    num_tokens, hidden = values.shape
    num_blocks = -(-hidden // scale_block)
    scaled = np.empty_like(values)
    scale = np.empty((num_tokens, num_blocks), np.float32)
    for block in range(num_blocks):
        columns = slice(block * scale_block, min((block + 1) * scale_block, hidden))
        block_scale, inverse = _block_scale(values[:, columns], pow2)
        scale[:, block] = block_scale
        with np.errstate(invalid="ignore", over="ignore"):  # inf * 0 is NaN, as on the device
            scaled[:, columns] = values[:, columns] * inverse[:, None]
    return _to_fp8(scaled), scale


def dequantize(q: Array, scale: Array | None, scale_block: int | None) -> Floats:
    """``q * scale`` in float32, every scale over its block of columns. ``q [T, H]``."""
    values: Floats = np.asarray(q).astype(np.float32)
    if scale is None or scale_block is None:
        if scale is not None or scale_block is not None:
            raise ConfigError(
                f"scale_block={scale_block} with scale {'given' if scale is not None else 'None'}: "
                "must be both or neither"
            )
        return values
    columns = np.arange(values.shape[-1]) // scale_block
    spread: Floats = values * np.asarray(scale, np.float32)[..., columns]
    return spread


def _block_scale(values: Floats, pow2: bool) -> tuple[Floats, Floats]:
    """``values [T, columns]`` of one block → scale ``[T]`` and what to multiply with ``[T]``."""
    magnitude = np.where(np.isnan(values), np.float32(0), np.abs(values))
    amax: Floats = np.maximum(magnitude.max(axis=1), SMALLEST_AMAX)
    scale: Floats = amax / FP8_MAX
    if not pow2:
        return scale, FP8_MAX / amax
    mantissa, exponent = np.frexp(scale)  # mantissa in [0.5, 1); infinity stays infinity
    above: Floats = np.ldexp(np.float32(1), exponent)
    rounded: Floats = np.where((mantissa == 0.5) | np.isinf(scale), scale, above)
    return rounded, np.float32(1) / rounded


def _to_fp8(values: Floats) -> Array:
    """Clamp, then round to nearest even, in one step from float32."""
    clamped = np.clip(values, -FP8_MAX, FP8_MAX)
    with np.errstate(invalid="ignore"):  # NaN; set below
        q: Array = clamped.astype(numpy_dtype("float8_e4m3fn"))
    q.view(np.uint8)[np.isnan(values)] = NAN_BYTE
    return q
