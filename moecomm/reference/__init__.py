"""Dispatch and combine over all ranks at once, slow and obvious: the specification.

Everything is a list over ranks, in rank order, of numpy arrays (bfloat16 and fp8 as ml_dtypes).
Kernels are compared with this bit for bit, so every multiplication and addition here is one
float32 operation with one rounding, in the order written.

Letters: R ranks, G source groups (R / ``replicas``), T tokens of a rank, K ``top_k``, H
``hidden``, L local experts, C rows of an expert, N rows of a rank, S scales of a row.
"""

from __future__ import annotations

from moecomm.codecs.plain import decode_rows as decode
from moecomm.codecs.plain import encode_rows as encode
from moecomm.reference.fp8 import dequantize, quantize
from moecomm.reference.returning import combine
from moecomm.reference.routing import expert_range
from moecomm.reference.sending import Received, dispatch

__all__ = [
    "Received",
    "combine",
    "decode",
    "dequantize",
    "dispatch",
    "encode",
    "expert_range",
    "quantize",
]
