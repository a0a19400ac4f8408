"""The fp8 block cast as a codec: the same bits as ``dispatch_dtype="float8_e4m3fn"``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from moecomm.codecs.definition import Codec

SMALLEST_AMAX = 1e-30  # an all-zero block still has a scale that divides
LARGEST = 448.0


@functools.cache
def fp8(block: int | None = 128, pow2: bool = False) -> Codec:
    """float8_e4m3fn with one float32 scale for every ``block`` columns, or for a token.

    ``pow2``: scales are rounded up to powers of two. What arrives is, bit for bit, what
    ``MoeConfig(dispatch_dtype="float8_e4m3fn", scale_block=block, scale_pow2=pow2)`` sends, which
    is a kernel of its own; as a codec it can also be decoded on arrival, or have one scale a token.

    Raises:
        CodecError: ``block`` is none that a codec may have.
    """
    name = f"fp8({block}{', pow2=True' if pow2 else ''})"
    scales = (_scale_pow2, _inverse_pow2) if pow2 else (_scale, _inverse)
    return Codec(name, "float8_e4m3fn", block, _encode, _decode, *scales)


def _scale(amax: Any) -> Any:
    return max(SMALLEST_AMAX, amax) / LARGEST


def _inverse(amax: Any) -> Any:
    return LARGEST / max(SMALLEST_AMAX, amax)


def _scale_pow2(amax: Any) -> Any:
    scale = np.float32(max(SMALLEST_AMAX, amax) / LARGEST)
    bits = (int(scale.view(np.uint32)) + 0x7FFFFF) & 0xFF800000
    return np.uint32(bits).view(np.float32)


def _inverse_pow2(amax: Any) -> Any:
    scale = np.float32(max(SMALLEST_AMAX, amax) / LARGEST)
    bits = (int(scale.view(np.uint32)) + 0x7FFFFF) & 0xFF800000
    return 1.0 / np.uint32(bits).view(np.float32)


def _encode(value: Any, inverse: Any) -> Any:
    bits = int(np.float32(value * inverse).view(np.uint32))
    sign = (bits >> 24) & 0x80
    rest = bits & 0x7FFFFFFF
    if rest > 0x7F800000:  # NaN
        return 0x7F
    if rest >= 0x43E00000:
        return sign | 0x7E
    if rest < 0x3C800000:  # below 2^-6: adding 2^14 leaves steps of 2^-9, rounded to even
        steps = np.float32(np.uint32(rest).view(np.float32) + 16384.0)
        return sign | (int(steps.view(np.uint32)) - 0x46800000)
    return sign | ((rest - 0x3C000000 + 0x7FFFF + ((rest >> 20) & 1)) >> 20)


def _decode(bits: Any, scale: Any) -> Any:
    sign = -scale if bits & 0x80 else scale
    mantissa = np.float32(bits & 7)
    exponent = (bits >> 3) & 15
    if exponent == 0:
        return mantissa * 0.001953125 * sign  # steps of 2^-9
    if exponent == 15 and mantissa == 7.0:
        return np.float32(np.nan)
    power = np.uint32((exponent + 120) << 23).view(np.float32)
    return (1.0 + mantissa * 0.125) * power * sign
