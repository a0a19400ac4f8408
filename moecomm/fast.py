"""The torch tensors that nearly every call brings, looked at in the least time.

On a GPU a half is a launch of a few microseconds, and building views of four tensors would take
longer than that. Here nothing is built: a tensor that is plain, contiguous, aligned and of the
expected type, device and shape gives its launch arguments; about anything else there is no opinion
(``None``), and the caller goes the long way through ``checks``, which accepts it or says what is
wrong. What is accepted here is accepted there, with the same numbers.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from moecomm import dtypes
from moecomm.arrays import Device
from moecomm.checks_dispatch import FP8, input_dtypes
from moecomm.config import MoeConfig

ROW_ALIGN: Final = 15  # address bits that must be 0: kernels move 16-byte words
ITEM_ALIGN: Final = 7


class FastTensors:
    """Looks at tensors for one configuration and one device.

    ``recv_shape``: what ``y`` must have.
    """

    def __init__(self, cfg: MoeConfig, recv_shape: tuple[int, ...], device: Device) -> None:
        self._cfg = cfg
        self._recv_shape = recv_shape
        self._index = -1 if device == "cpu" else device[1]  # as Tensor.get_device says
        self._hidden, self._top_k, self._max_tokens = cfg.hidden, cfg.top_k, cfg.max_tokens
        self._num_scales, self._weights_travel = cfg.num_scales, cfg.weights_travel
        self._row_bytes = cfg.hidden * dtypes.itemsize(cfg.combine_dtype)
        self._row_aligned = int(self._row_bytes & ROW_ALIGN == 0)
        self._tensor: Any = None  # torch.Tensor, once torch is loaded

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any
    ) -> tuple[tuple[int, ...], int, int] | None:
        """Values of ``DISPATCH_FIELDS``, rows of ``x``, and the code of its element type."""
        if type(x) is not self._tensor and not self._bind(x):
            return None
        known = self._inputs.get(x.dtype)
        if known is None:
            return None
        code, row_bytes, row_aligned, scaled = known
        shape = x.shape
        if len(shape) != 2 or shape[1] != self._hidden or shape[0] > self._max_tokens:
            return None
        rows = shape[0]
        at_x = self._floats(x, x.dtype, shape)
        at_idx, idx_bytes = self._indices(topk_idx, (rows, self._top_k))
        at_weights = weight_stride = at_scale = scale_row = scale_step = at_num = 0
        if topk_weights is not None:
            at_weights = self._floats(topk_weights, self._float32, (rows, self._top_k))
            weight_stride = 4 * self._top_k
        elif self._weights_travel:
            return None
        if scaled:
            at_scale = self._floats(x_scale, self._float32, (rows, self._num_scales))
            scale_row, scale_step = 4 * self._num_scales, 4
        elif x_scale is not None:
            return None
        if num_tokens is not None:
            at_num, num_bytes = self._indices(num_tokens, (1,))
            if num_bytes != 4:
                return None
        small = at_idx | at_weights | at_scale | at_num
        if at_x | small < 0 or at_x & ROW_ALIGN or small & ITEM_ALIGN:
            return None
        words = (
            at_x, row_bytes, row_aligned, at_scale, scale_row, scale_step,
            at_idx, idx_bytes * self._top_k, idx_bytes, at_weights, weight_stride, at_num, rows,
        )  # fmt: skip
        return words, rows, code

    def outputs(self, y: Any) -> tuple[int, int, int] | None:
        """Values of ``Y_FIELDS``."""
        if type(y) is not self._tensor and not self._bind(y):
            return None
        return self._rows(y, self._recv_shape)

    def result(self, out: Any, num_rows: int) -> tuple[int, int, int] | None:
        """Values of ``OUT_FIELDS`` but the last."""
        if type(out) is not self._tensor and not self._bind(out):
            return None
        return self._rows(out, (num_rows, self._hidden))

    def weights(self, topk_weights: Any, num_rows: int) -> tuple[int, int] | None:
        """Values of ``WEIGHT_FIELDS``, where the configuration takes weights at combine."""
        if type(topk_weights) is not self._tensor and not self._bind(topk_weights):
            return None
        if self._cfg.layout == "rank" or self._weights_travel:
            return None
        at = self._floats(topk_weights, self._float32, (num_rows, self._top_k))
        return None if at < 0 or at & ITEM_ALIGN else (at, 4 * self._top_k)

    def new_result(self, num_rows: int) -> tuple[tuple[int, int, int], Any]:
        """``result`` for a new tensor, and that tensor; after a dispatch of torch tensors."""
        if self._tensor is None:
            self._bind(sys.modules["torch"].empty(0))
        shape = num_rows, self._hidden
        out = self._empty(shape, dtype=self._combine, device=self._torch_device)
        return (out.data_ptr(), self._row_bytes, self._row_aligned), out

    def _rows(self, tensor: Any, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        at = self._floats(tensor, self._combine, shape)
        if at < 0 or at & ROW_ALIGN:
            return None
        return at, self._row_bytes, self._row_aligned

    def _floats(self, tensor: Any, dtype: Any, shape: tuple[int, ...]) -> int:
        """Where its elements begin; negative where it is not of the usual form."""
        try:
            if (
                type(tensor) is self._tensor
                and tensor.dtype is dtype
                and tensor.shape == shape
                and tensor.get_device() == self._index
                and tensor.is_contiguous()
                and not tensor.requires_grad
                and not tensor.is_neg()
            ):
                return tensor.data_ptr() or -1  # null: empty, or without memory of its own
        except RuntimeError:  # sparse, or under a transform of torch.func
            return -1
        return -1

    def _indices(self, tensor: Any, shape: tuple[int, ...]) -> tuple[int, int]:
        """The same for integers, which have no gradient or sign bit; and bytes of an element."""
        try:
            if (
                type(tensor) is self._tensor
                and tensor.shape == shape
                and tensor.get_device() == self._index
                and tensor.is_contiguous()
            ):
                size = self._idx_bytes.get(tensor.dtype, 0)
                return (tensor.data_ptr() or -1) if size else -1, size
        except RuntimeError:
            return -1, 0
        return -1, 0

    def _bind(self, array: Any) -> bool:
        """Once torch is there: whether ``array`` is a plain tensor of it."""
        torch = sys.modules.get("torch")
        if self._tensor is not None or torch is None or type(array) is not torch.Tensor:
            return False
        cfg = self._cfg
        self._empty = torch.empty
        self._float32 = torch.float32
        self._idx_bytes = {torch.int32: 4, torch.int64: 8}
        self._combine = dtypes.torch_dtype(torch, cfg.combine_dtype)
        self._torch_device = torch.device("cpu" if self._index < 0 else f"cuda:{self._index}")
        self._inputs: dict[Any, tuple[int, int, int, bool]] = {}
        for name in input_dtypes(cfg):
            row_bytes = self._hidden * dtypes.itemsize(name)
            scaled = name == FP8 and cfg.scale_block is not None
            entry = dtypes.code(name), row_bytes, int(row_bytes & ROW_ALIGN == 0), scaled
            self._inputs[dtypes.torch_dtype(torch, name)] = entry
        self._tensor = torch.Tensor
        return True
