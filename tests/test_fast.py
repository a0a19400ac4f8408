"""The quick look at torch tensors accepts nothing that the long way refuses, and says the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moecomm.arguments import dispatch_words, row_words, weight_words
from moecomm.checks_combine import check_combine_inputs, check_combine_weights, check_out
from moecomm.checks_dispatch import check_dispatch_inputs
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.fast import FastTensors
from moecomm.kernels.args import (
    ARG_FIELDS,
    DISPATCH_FIELDS,
    OUT_FIELDS,
    WEIGHT_FIELDS,
    Y_FIELDS,
    ArgBlock,
    Args,
    Fields,
)

BASE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 8}
FP8 = torch.float8_e4m3fn
CONFIGS = {
    "bf16": MoeConfig(**BASE),
    "odd": MoeConfig(**{**BASE, "hidden": 37}, dispatch_dtype="float32", combine_dtype="float32"),
    "fp8": MoeConfig(**BASE, dispatch_dtype="float8_e4m3fn", scale_block=16),
    "fp8 without scales": MoeConfig(**BASE, dispatch_dtype="float8_e4m3fn"),
    "sender": MoeConfig(**BASE, reduce="sender"),
    "rank": MoeConfig(**BASE, layout="rank"),
}
RECV_SHAPE = (4, 16, 64)


def fast(cfg: MoeConfig) -> FastTensors:
    return FastTensors(cfg, RECV_SHAPE, "cpu")


def good(cfg: MoeConfig, rows: int = 3) -> dict[str, Any]:
    dtype = getattr(torch, cfg.dispatch_dtype)
    scaled = cfg.num_scales > 0
    return {
        "x": torch.zeros(rows, cfg.hidden).to(dtype),
        "topk_idx": torch.zeros(rows, cfg.top_k, dtype=torch.int64),
        "topk_weights": torch.ones(rows, cfg.top_k),
        "x_scale": torch.ones(rows, cfg.num_scales) if scaled else None,
        "num_tokens": torch.tensor([rows], dtype=torch.int32),
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element further on."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    moved = room[1:].view(tensor.shape)
    return moved.copy_(tensor)


def between_words(tensor: torch.Tensor) -> torch.Tensor:
    """Some memory that begins 4 bytes after a multiple of 16."""
    room = bytearray(tensor.nbytes + 32)
    start = (4 - torch.frombuffer(room, dtype=torch.uint8).data_ptr()) % 16
    return torch.frombuffer(room, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(
        tensor.shape
    )


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of a wider matrix."""
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


def needs_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


class Subclass(torch.Tensor):
    pass


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda t: None,
    "no array": lambda t: 3,
    "numpy": lambda t: np.zeros(t.shape, np.float32),
    "double": lambda t: t.to(torch.float64),
    "half": lambda t: t.to(torch.float16),
    "int32": lambda t: t.to(torch.int32),
    "bool": lambda t: t.to(torch.bool),
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "no rows": lambda t: t[:0],
    "one row": lambda t: t[:1],
    "one dimension": lambda t: t.flatten(),
    "three dimensions": lambda t: t[None],
    "one column less": lambda t: t[..., 1:],
    "misaligned": misaligned,
    "between words": between_words,
    "transposed": lambda t: transposed(t) if t.dim() == 2 else t,
    "wide": lambda t: wide(t) if t.dim() == 2 else t,
    "backwards": lambda t: t.flip(0),
    "negated": lambda t: torch._neg_view(t.to(torch.float32)),
    "needs grad": lambda t: needs_grad(t.to(torch.float32)),
    "sparse": lambda t: t.to(torch.float32).to_sparse(),
    "csr": lambda t: t.to(torch.float32).to_sparse_csr() if t.dim() == 2 else None,
    "nested": lambda t: torch.nested.nested_tensor([t.to(torch.float32)]),
    "meta": lambda t: t.to("meta"),
    "fake": fake,
    "freed": freed,
    "subclass": lambda t: t.as_subclass(Subclass),
}


def the_long_way(cfg: MoeConfig, given: dict[str, Any]) -> tuple[tuple[int, ...], int, int] | None:
    try:
        found = check_dispatch_inputs(cfg, **given, device="cpu")
    except (ConfigError, RuntimeError):
        return None
    return dispatch_words(found), found.num_rows, found.x_code


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("remembers", [False, True])
def test_what_is_taken_is_what_the_long_way_takes(name: str, remembers: bool) -> None:
    cfg = CONFIGS[name]
    quick = fast(cfg)
    taken = 0
    pairs = itertools.combinations_with_replacement(range(5), 2)
    for (first, second), odd, other in itertools.product(pairs, ODD, ("int32", "one row", "half")):
        given = good(cfg)
        names = list(given)
        for index, change in ((first, odd), (second, other)):
            key = names[index]
            if isinstance(given[key], torch.Tensor) and (index != first or change == odd):
                try:
                    given[key] = ODD[change](given[key])
                except (RuntimeError, NotImplementedError, IndexError):
                    continue  # there is no such tensor of this type
        for _ in range(2 if remembers else 0):
            assert quick.dispatch(**good(cfg)) is not None
        found = quick.dispatch(**given)
        taken += found is not None
        if found is not None:
            assert found == the_long_way(cfg, given), (first, odd, second, other)
    assert taken > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_usual_tensors_are_taken(name: str, rows: int) -> None:
    cfg = CONFIGS[name]
    given = good(cfg, rows)
    for fewer in ({}, {"num_tokens": None}, {"topk_idx": given["topk_idx"].int()}):
        changed = {**given, **fewer}
        found = fast(cfg).dispatch(**changed)
        assert found is not None
        assert found == the_long_way(cfg, changed)
        assert len(found[0]) == len(DISPATCH_FIELDS.names)
    without = {**given, "topk_weights": None}
    assert (fast(cfg).dispatch(**without) is None) == cfg.weights_travel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_that_dispatch_casts_are_taken(dtype: torch.dtype) -> None:
    cfg = CONFIGS["fp8"]
    given = {**good(cfg), "x": torch.zeros(3, cfg.hidden, dtype=dtype), "x_scale": None}
    found = fast(cfg).dispatch(**given)
    assert found is not None
    assert found == the_long_way(cfg, given)
    assert fast(cfg).dispatch(**{**given, "x_scale": torch.ones(3, cfg.num_scales)}) is None


def test_more_tokens_than_allowed_go_the_long_way() -> None:
    cfg = CONFIGS["bf16"]
    assert fast(cfg).dispatch(**good(cfg, 9)) is None


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("odd", [None, *ODD])
@pytest.mark.parametrize("remembers", [False, True])
def test_combine_arrays(odd: str | None, remembers: bool) -> None:
    cfg = CONFIGS["bf16"]
    quick = fast(cfg)
    y = torch.zeros(RECV_SHAPE, dtype=torch.bfloat16)
    out = torch.zeros(3, 64, dtype=torch.bfloat16)
    weights = torch.ones(3, 2)
    for _ in range(2 if remembers else 0):
        assert None not in (quick.outputs(y), quick.result(out, 3), quick.weights(weights, 3))
    if odd is not None:
        if odd == "csr":
            return
        try:
            y, out, weights = ODD[odd](y), ODD[odd](out), ODD[odd](weights)
        except (RuntimeError, NotImplementedError):
            return
    found = quick.outputs(y)
    if found is not None:
        assert found == row_words(check_combine_inputs(cfg, y, RECV_SHAPE, "cpu"))
    found = quick.result(out, 3)
    if found is not None:
        view = check_out(cfg, out, 3, False, "cpu")
        assert view is not None
        assert found == row_words(view)
    weighed = quick.weights(weights, 3)
    if weighed is not None:
        view = check_combine_weights(cfg, weights, 3, "cpu", given_at_dispatch=False)
        assert weighed == weight_words(view)
    if odd is None:
        assert None not in (quick.outputs(y), quick.result(out, 3), quick.weights(weights, 3))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_remembered_form_gives_each_call_its_own_numbers(rows: int) -> None:
    cfg = CONFIGS["fp8"]
    quick = fast(cfg)
    for _ in range(3):
        given = good(cfg, rows)  # elsewhere in memory each time
        for fewer in ({}, {"topk_weights": None}, {"num_tokens": None}):
            for _ in range(3):
                changed = {**given, **fewer}
                assert quick.dispatch(**changed) == the_long_way(cfg, changed)
    other = good(cfg, 5)
    assert quick.dispatch(**other) == the_long_way(cfg, other)
    assert quick.dispatch(**{**other, "topk_idx": given["topk_idx"]}) is None


def test_a_gradient_matters_only_while_grad_mode_is_on() -> None:
    cfg = CONFIGS["bf16"]
    quick = fast(cfg)
    given = good(cfg)
    needing = {**given, "x": needs_grad(given["x"])}
    with torch.no_grad():
        for _ in range(3):
            assert quick.dispatch(**given) is not None
        found = quick.dispatch(**needing)
        assert found in (None, the_long_way(cfg, needing))
    assert quick.dispatch(**needing) is None


@pytest.mark.parametrize("name", ["rank", "sender"])
def test_weights_at_combine_go_the_long_way_where_they_are_refused(name: str) -> None:
    assert fast(CONFIGS[name]).weights(torch.ones(3, 2), 3) is None


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("name", ["bf16", "odd"])
def test_a_new_result(name: str, rows: int) -> None:
    cfg = CONFIGS[name]
    words, out = fast(cfg).new_result(rows)
    assert (tuple(out.shape), out.dtype) == (
        (rows, cfg.hidden),
        getattr(torch, cfg.combine_dtype),
    )
    assert words == (out.data_ptr(), cfg.hidden * out.element_size(), int(name == "bf16"))


def test_fields_lie_as_they_are_written() -> None:
    assert DISPATCH_FIELDS.names == (
        "x", "x_stride", "x_aligned", "x_scale", "x_scale_row_stride", "x_scale_col_stride",
        "topk_idx", "topk_idx_stride", "topk_idx_bytes", "topk_weights", "topk_weights_stride",
        "num_tokens", "max_rows",
    )  # fmt: skip
    assert WEIGHT_FIELDS.names == ("topk_weights", "topk_weights_stride")
    assert Y_FIELDS.names == ("y", "y_stride", "y_aligned")
    assert OUT_FIELDS.names == ("out", "out_stride", "out_aligned", "accumulate")


@pytest.mark.parametrize("fields", [DISPATCH_FIELDS, WEIGHT_FIELDS, Y_FIELDS, OUT_FIELDS])
def test_a_block_changes_in_the_fields_that_are_written(fields: Fields) -> None:
    before = dict(zip(ARG_FIELDS, range(100, 200), strict=False))
    block = ArgBlock(Args(**before))
    values = tuple((1 << 64) - 1 - n for n in range(len(fields.names)))
    block.write(fields, values)
    after = {name: getattr(block.args, name) for name in ARG_FIELDS}
    assert after == {**before, **dict(zip(fields.names, values, strict=True))}
