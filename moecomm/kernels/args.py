"""The launch arguments and status records, field for field as ``protocol.cuh`` declares them."""

from __future__ import annotations

import ctypes
import struct
from typing import Final

_WORD = ctypes.c_uint64

ARG_FIELDS: Final = (
    "local", "symmetric", "status", "rank", "slot", "num_local", "timeout_ns",
    "x", "x_stride", "x_aligned", "x_scale", "x_scale_row_stride", "x_scale_col_stride",
    "topk_idx", "topk_idx_stride", "topk_idx_bytes", "topk_weights", "topk_weights_stride",
    "num_tokens", "max_rows",
    "y", "y_stride", "y_aligned", "out", "out_stride", "out_aligned", "accumulate",
    "remote_flags", "remote_bulk", "network_bulk", "beside",
)  # fmt: skip
STATUS_FIELDS: Final = ("code", "phase", "rank", "peer", "epoch", "expected", "seen", "slot")

# Status records, in this order.
STATUS_FAILURE, STATUS_VALUE, STATUS_OVERFLOW = range(3)
CODE_TIMEOUT, CODE_ABORTED, CODE_BAD_EXPERT, CODE_BAD_NUM_TOKENS, CODE_OVERFLOW = range(1, 6)
PHASES: Final = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


class Args(ctypes.Structure):
    """Argument block of every kernel; a kernel reads the fields of its own stage."""

    _fields_ = [(name, _WORD) for name in ARG_FIELDS]


class Fields:
    """Neighbouring fields of ``Args``, written in one go."""

    def __init__(self, first: str, last: str) -> None:
        start, end = ARG_FIELDS.index(first), ARG_FIELDS.index(last) + 1
        self.names: Final = ARG_FIELDS[start:end]
        self.pack: Final = struct.Struct(f"={end - start}Q").pack
        self.place: Final = slice(getattr(Args, first).offset, ctypes.sizeof(_WORD) * end)


DISPATCH_FIELDS: Final = Fields("x", "max_rows")
WEIGHT_FIELDS: Final = Fields("topk_weights", "topk_weights_stride")
Y_FIELDS: Final = Fields("y", "y_aligned")
OUT_FIELDS: Final = Fields("out", "accumulate")


class ArgBlock:
    """The arguments of one slot's launches, at a fixed place. Each half writes what its stage
    reads; launching copies them, so that the next half may write at once.

    ``pointers`` is the address of what ``cuLaunchKernel`` calls ``kernelParams``.
    """

    __slots__ = ("_bytes", "_pointers", "args", "pointers")

    def __init__(self, args: Args) -> None:
        self.args = args
        self._bytes = memoryview(args).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.pointers = ctypes.addressof(self._pointers)

    def write(self, fields: Fields, values: tuple[int, ...]) -> None:
        """Set ``fields``, in the order of their names."""
        # 0.06 µs less than pack_into, whose other arguments Python has to put before the values.
        self._bytes[fields.place] = fields.pack(*values)


class Status(ctypes.Structure):
    """One report of a kernel; ``code`` 0 means none."""

    _fields_ = [(name, _WORD) for name in STATUS_FIELDS]


STATUS_BYTES: Final = 3 * ctypes.sizeof(Status)
