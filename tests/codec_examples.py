"""Codecs that tests use: the example's, and one for each thing that a codec may leave out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

import moecomm as mc

EXAMPLE = Path(__file__).parents[1] / "examples" / "int8_codec.py"


def _load_example() -> Any:
    spec = importlib.util.spec_from_file_location("int8_codec", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["int8_codec"] = module
    spec.loader.exec_module(module)
    return module


Int8PerToken: Any = _load_example().Int8PerToken


@mc.codec(wire_dtype="uint8", block=32)
class OffsetBinary:
    """No inverse; zero is 128, so padding must not be taken for it."""

    def scale(amax):
        return max(1e-20, amax) / 127.0

    def encode(value, scale):
        return round(max(-128.0, min(127.0, value / scale))) + 128

    def decode(bits, scale):
        return np.float32(bits - 128) * scale


@mc.codec(wire_dtype="bfloat16")
class Truncated:
    """No scales; two bytes, by cutting a float32 off. Not one division."""

    def encode(value):
        return int(np.float32(value).view(np.uint32)) >> 16

    def decode(bits):
        return np.uint32(bits << 16).view(np.float32)


TABLE = np.linspace(-1, 1, 256).astype(np.float32)
MARGIN = 0.75


@mc.codec(wire_dtype="int16", block=256)
class Steps16:
    """Two bytes with sign, scales and a table; multiplies and adds."""

    def scale(amax):
        return amax * MARGIN + 1.0

    def inverse(amax):
        return 16384.0 / (amax * MARGIN + 1.0)

    def encode(value, inverse):
        return round(max(-32768.0, min(32767.0, value * inverse + 3.0)))

    def decode(bits, scale):
        share = np.float32(bits - 3) * np.float32(1 / 16384)
        return share * scale + TABLE[bits & 255]


ALL = {
    codec.name: codec
    for codec in (
        Int8PerToken,
        OffsetBinary,
        Truncated,
        Steps16,
        mc.codecs.fp8(16),
        mc.codecs.fp8(None, pow2=True),
    )
}
