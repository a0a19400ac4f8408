"""Codecs: how a row is encoded for the wire and decoded on arrival, written in Python.

``codec`` makes one from a class; ``fp8`` is the cast to float8_e4m3fn as one. The functions are
compiled by numba, for GPUs to LTO-IR that is linked into the kernels. Nothing of numba is imported
before a codec is used. ``docs/codecs.md`` has the rules.
"""

from __future__ import annotations

from moecomm.codecs.definition import WIRE_DTYPES, Codec, codec, find
from moecomm.codecs.fp8_cast import fp8

__all__ = ["WIRE_DTYPES", "Codec", "codec", "find", "fp8"]
