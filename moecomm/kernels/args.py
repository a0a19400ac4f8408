"""The launch arguments and status records, field for field as ``protocol.cuh`` declares them."""

from __future__ import annotations

import ctypes
from typing import Final

_WORD = ctypes.c_uint64

ARG_FIELDS: Final = (
    "local", "symmetric", "status", "rank", "slot", "num_local", "first_expert", "timeout_ns",
    "x", "x_stride", "x_aligned", "x_scale", "x_scale_row_stride", "x_scale_col_stride",
    "topk_idx", "topk_idx_stride", "topk_idx_bytes", "topk_weights", "topk_weights_stride",
    "num_tokens", "max_rows",
    "y", "y_stride", "y_aligned", "out", "out_stride", "out_aligned", "accumulate",
)  # fmt: skip
STATUS_FIELDS: Final = ("code", "phase", "rank", "peer", "epoch", "expected", "seen", "slot")

# Status records, in this order.
STATUS_FAILURE, STATUS_VALUE, STATUS_OVERFLOW = range(3)
CODE_TIMEOUT, CODE_ABORTED, CODE_BAD_EXPERT, CODE_BAD_NUM_TOKENS, CODE_OVERFLOW = range(1, 6)
PHASES: Final = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


class Args(ctypes.Structure):
    """Argument block of every kernel; a kernel reads the fields of its own stage."""

    _fields_ = [(name, _WORD) for name in ARG_FIELDS]


class Status(ctypes.Structure):
    """One report of a kernel; ``code`` 0 means none."""

    _fields_ = [(name, _WORD) for name in STATUS_FIELDS]


STATUS_BYTES: Final = 3 * ctypes.sizeof(Status)
