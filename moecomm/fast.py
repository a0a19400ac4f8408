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
from moecomm.same_form import SameForm

ROW_ALIGN: Final = 15  # address bits that must be 0: kernels move 16-byte words
ITEM_ALIGN: Final = 7
NOWHERE: Final = 1  # instead of null, where there is no memory: an address that keeps to neither


class _Unusual(Exception):
    """A tensor is not of the usual form."""


# torch's own: the tensor is sparse, or under a transform of torch.func.
UNUSUAL: Final = (_Unusual, RuntimeError)


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
        self._torch: Any = None  # once it is loaded
        self._tensor: Any = None  # torch.Tensor, then
        self._same_inputs, self._same_y = SameForm(), SameForm()
        self._same_weights, self._same_out = SameForm(), SameForm()

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any
    ) -> tuple[tuple[int, ...], int, int] | None:
        """Values of ``DISPATCH_FIELDS``, rows of ``x``, and the code of its element type."""
        given: tuple[Any, ...] = x, topk_idx
        if topk_weights is not None:
            given += (topk_weights,)
        if x_scale is not None:
            given += (x_scale,)
        if num_tokens is not None:
            given += (num_tokens,)
        which = topk_weights is None, x_scale is None, num_tokens is None
        try:
            form = self._same_inputs.facts(which, given)
            if form is None:
                form = self._form(x, topk_idx, topk_weights, x_scale, num_tokens)
                self._same_inputs.keep(self._torch, which, form, given)
            at_x, at_idx = x.data_ptr() or NOWHERE, topk_idx.data_ptr() or NOWHERE
            at_weights = 0 if topk_weights is None else topk_weights.data_ptr() or NOWHERE
            at_scale = 0 if x_scale is None else x_scale.data_ptr() or NOWHERE
            at_num = 0 if num_tokens is None else num_tokens.data_ptr() or NOWHERE
        except UNUSUAL:
            return None
        if at_x & ROW_ALIGN or (at_idx | at_weights | at_scale | at_num) & ITEM_ALIGN:
            return None
        code, rows, x_row, x_aligned, scale_row, scale_step, idx_row, idx_bytes, weight_row = form
        words = (
            at_x, x_row, x_aligned, at_scale, scale_row, scale_step,
            at_idx, idx_row, idx_bytes, at_weights, weight_row, at_num, rows,
        )  # fmt: skip
        return words, rows, code

    def outputs(self, y: Any) -> tuple[int, int, int] | None:
        """Values of ``Y_FIELDS``."""
        return self._rows(y, self._recv_shape, self._same_y)

    def result(self, out: Any, num_rows: int) -> tuple[int, int, int] | None:
        """Values of ``OUT_FIELDS`` but the last."""
        return self._rows(out, (num_rows, self._hidden), self._same_out)

    def weights(self, topk_weights: Any, num_rows: int) -> tuple[int, int] | None:
        """Values of ``WEIGHT_FIELDS``, where the configuration takes weights at combine."""
        if self._cfg.layout == "rank" or self._weights_travel:
            return None
        shape, given = (num_rows, self._top_k), (topk_weights,)
        try:
            if not self._same_weights.facts(shape, given):
                self._check_bound(topk_weights)
                self._check_floats(topk_weights, self._float32, shape)
                self._same_weights.keep(self._torch, shape, True, given)
            return _address(topk_weights, ITEM_ALIGN), 4 * self._top_k
        except UNUSUAL:
            return None

    def new_result(self, num_rows: int) -> tuple[tuple[int, int, int], Any]:
        """``result`` for a new tensor, and that tensor; after a dispatch of torch tensors."""
        if self._torch is None:
            self._bind(sys.modules["torch"].empty(0))
        shape = num_rows, self._hidden
        out = self._torch.empty(shape, dtype=self._combine, device=self._torch_device)
        return (out.data_ptr(), self._row_bytes, self._row_aligned), out

    def _rows(
        self, tensor: Any, shape: tuple[int, ...], same: SameForm
    ) -> tuple[int, int, int] | None:
        given = (tensor,)
        try:
            if not same.facts(shape, given):
                self._check_bound(tensor)
                self._check_floats(tensor, self._combine, shape)
                same.keep(self._torch, shape, True, given)
            return _address(tensor, ROW_ALIGN), self._row_bytes, self._row_aligned
        except UNUSUAL:
            return None

    # ---- all that there is to know of tensors but their addresses; these raise UNUSUAL -----------

    def _form(
        self, x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any
    ) -> tuple[int, ...]:
        """Code of ``x``'s element type, and those of ``DISPATCH_FIELDS`` that are no addresses."""
        self._check_bound(x)
        shape = x.shape
        if x.dtype not in self._inputs or len(shape) != 2 or shape[0] > self._max_tokens:
            raise _Unusual
        code, x_row, x_aligned, scaled = self._inputs[x.dtype]
        rows = shape[0]
        self._check_floats(x, x.dtype, (rows, self._hidden))
        idx_bytes = self._check_integers(topk_idx, (rows, self._top_k))
        weight_row = scale_row = scale_step = 0
        if topk_weights is not None:
            self._check_floats(topk_weights, self._float32, (rows, self._top_k))
            weight_row = 4 * self._top_k
        elif self._weights_travel:
            raise _Unusual
        if scaled:
            self._check_floats(x_scale, self._float32, (rows, self._num_scales))
            scale_row, scale_step = 4 * self._num_scales, 4
        elif x_scale is not None:
            raise _Unusual
        if num_tokens is not None and self._check_integers(num_tokens, (1,)) != 4:
            raise _Unusual
        idx_row = idx_bytes * self._top_k
        return code, rows, x_row, x_aligned, scale_row, scale_step, idx_row, idx_bytes, weight_row

    def _check_floats(self, tensor: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        if (
            type(tensor) is not self._tensor
            or tensor.dtype is not dtype
            or tensor.shape != shape
            or tensor.get_device() != self._index
            or not tensor.is_contiguous()
            or tensor.requires_grad
            or tensor.is_neg()
        ):
            raise _Unusual

    def _check_integers(self, tensor: Any, shape: tuple[int, ...]) -> int:
        """The same for integers, which have no gradient or sign bit. Bytes of an element."""
        if (
            type(tensor) is not self._tensor
            or tensor.dtype not in self._integer_bytes
            or tensor.shape != shape
            or tensor.get_device() != self._index
            or not tensor.is_contiguous()
        ):
            raise _Unusual
        return self._integer_bytes[tensor.dtype]

    def _check_bound(self, array: Any) -> None:
        if type(array) is not self._tensor and not self._bind(array):
            raise _Unusual

    def _bind(self, array: Any) -> bool:
        """Once torch is there: whether ``array`` is a plain tensor of it."""
        torch = sys.modules.get("torch")
        if self._torch is not None or torch is None or type(array) is not torch.Tensor:
            return False
        cfg = self._cfg
        self._float32 = torch.float32
        self._integer_bytes = {torch.int32: 4, torch.int64: 8}
        self._combine = dtypes.torch_dtype(torch, cfg.combine_dtype)
        self._torch_device = torch.device("cpu" if self._index < 0 else f"cuda:{self._index}")
        self._inputs: dict[Any, tuple[int, int, int, bool]] = {}
        for name in input_dtypes(cfg):
            row_bytes = self._hidden * dtypes.itemsize(name)
            scaled = name == FP8 and cfg.scale_block is not None
            entry = dtypes.code(name), row_bytes, int(row_bytes & ROW_ALIGN == 0), scaled
            self._inputs[dtypes.torch_dtype(torch, name)] = entry
        self._torch, self._tensor = torch, torch.Tensor
        return True


def _address(tensor: Any, align: int) -> int:
    """Where its elements begin; raises ``UNUSUAL`` where kernels cannot begin there."""
    at: int = tensor.data_ptr() or NOWHERE
    if at & align:
        raise _Unusual
    return at
