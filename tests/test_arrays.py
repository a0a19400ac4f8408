"""Memory turned into callers' arrays, and views into what kernels read."""

from __future__ import annotations

import gc
import mmap
import weakref
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from payload import assert_same_bits, payload, payload_fp8

from moecomm.arrays import (
    ArrayView,
    as_float32,
    as_numpy,
    copied,
    empty_like_kind,
    fits_kernels,
    kernel_ready,
    plain_strides,
    view,
    wrap,
)
from moecomm.dtypes import numpy_dtype
from moecomm.errors import ConfigError

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "int64"]
KINDS: list[Any] = ["numpy", "torch"]


class Owner:
    """Memory that can be seen to be freed."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.zeros(num_bytes, np.uint8)
        self.pointer = self.array.ctypes.data


# ---- wrap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_array_is_the_memory(kind: Any, dtype: str) -> None:
    size = numpy_dtype(dtype).itemsize
    owner = Owner(3 * 4 * size)
    array = wrap(owner.pointer, (3, 4), dtype, kind, owner)
    assert type(array) is {"numpy": np.ndarray, "torch": torch.Tensor}[kind]
    found = view(array, "x")
    assert (found.pointer, found.dtype, found.shape) == (owner.pointer, dtype, (3, 4))
    assert found.writable
    values = payload_fp8(np.arange(3), 4).astype(numpy_dtype(dtype))
    owner.array[:] = values.reshape(-1).view(np.uint8)
    assert_same_bits(as_numpy(view(array, "x")), values, "written below, seen above")
    array[1] = array[0]
    assert owner.array[4 * size : 8 * size].tolist() == owner.array[: 4 * size].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_owner_lives_as_long_as_anything_made_from_the_array(kind: Any, dtype: str) -> None:
    owner = Owner(64)
    gone = weakref.ref(owner)
    array = wrap(owner.pointer, (2, 4), dtype, kind, owner)
    del owner
    part = array[1:]
    del array
    gc.collect()
    assert gone() is not None
    assert part.shape == (1, 4)
    found = view(part, "x")
    del part
    gc.collect()
    assert gone() is not None
    del found
    gc.collect()
    assert gone() is None


def test_shared_memory_of_a_mapping_can_be_wrapped() -> None:
    mapping = mmap.mmap(-1, 4096)
    here = np.frombuffer(mapping, np.uint8)
    array = wrap(here.ctypes.data + 128, (4,), "float32", "numpy", here)
    mapping[128:132] = np.float32(1.5).tobytes()
    assert array[0] == 1.5


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (0, 2, 8)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_arrays_keep_their_shape(kind: Any, shape: tuple[int, ...], dtype: str) -> None:
    """G06."""
    for array in (wrap(0, shape, dtype, kind, None), empty_like_kind(kind, shape, dtype, "cpu")):
        assert tuple(array.shape) == shape
        assert view(array, "x").dtype == dtype
        assert as_numpy(view(array, "x")).shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_new_arrays(kind: Any, dtype: str) -> None:
    found = view(empty_like_kind(kind, (3, 5), dtype, "cpu"), "out")
    assert (found.kind, found.dtype, found.shape, found.device) == (kind, dtype, (3, 5), "cpu")
    assert kernel_ready(found, "out") is not None
    assert found.strides_bytes[1] == numpy_dtype(dtype).itemsize


def test_kinds_stay_on_their_device() -> None:
    with pytest.raises(ConfigError, match="numpy arrays do not live on a GPU"):
        empty_like_kind("numpy", (2,), "float32", ("cuda", 0))
    with pytest.raises(ConfigError, match="cupy arrays do not live on a CPU"):
        empty_like_kind("cupy", (2,), "float32", "cpu")
    with pytest.raises(ConfigError, match="cupy arrays do not live on a CPU"):
        wrap(4096, (2,), "float32", "cupy", None)


# ---- kernel_ready --------------------------------------------------------------------------


def ready_bits(array: np.ndarray) -> tuple[bool, np.ndarray]:
    """Whether it was taken in place, and what kernels then read."""
    found = view(array, "x")
    ready = kernel_ready(found, "x")
    assert fits_kernels(ready)
    return ready.pointer == found.pointer, as_numpy(ready)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_rows_with_a_stride_are_read_in_place(dtype: str) -> None:
    wide = payload_fp8(np.arange(6), 16).astype(numpy_dtype(dtype))
    for array in (wide, wide[:, :8], wide[::2], wide[1:, 3:5], wide[:1, :1]):
        in_place, bits = ready_bits(array)
        assert in_place
        assert_same_bits(bits, array, "in place")


@pytest.mark.parametrize("index", [np.s_[:, ::2], np.s_[::-1], np.s_[:, ::-1]])
def test_other_strides_are_copied_on_the_cpu(index: Any) -> None:
    array = payload(np.arange(6), 16)[index]
    in_place, bits = ready_bits(array)
    assert not in_place
    assert bits.flags.c_contiguous
    assert_same_bits(bits, array, "copied")
    assert not ready_bits(payload(np.arange(6), 16).T)[0]


def test_row_stride_between_elements_and_odd_address_are_copied() -> None:
    raw = np.zeros(101, np.uint8)
    odd = raw[1:97].view(np.float32).reshape(4, 6)
    odd[:] = np.arange(24).reshape(4, 6)
    assert not ready_bits(odd)[0]
    assert_same_bits(ready_bits(odd)[1], odd, "odd address")
    start = (-raw.ctypes.data) % 4
    skewed = np.ndarray((4, 2), np.float32, raw, start, (10, 4))
    skewed[:] = np.arange(8).reshape(4, 2)
    assert not ready_bits(skewed)[0]
    assert_same_bits(ready_bits(skewed)[1], skewed, "stride 10")


def test_expanded_rows_are_read_in_place() -> None:
    spread = np.broadcast_to(np.arange(3, dtype=np.float32), (5, 3))
    in_place, bits = ready_bits(spread)
    assert in_place
    assert_same_bits(bits, spread, "stride 0")


def test_strides_over_one_element_mean_nothing() -> None:
    found = view(np.zeros((4, 1), np.float32), "x")
    ready = kernel_ready(replace(found, strides_bytes=(4, 999)), "x")
    assert ready.strides_bytes == (4, 4)
    assert ready.pointer == found.pointer
    one = replace(view(np.zeros((1, 3), np.float32), "x"), strides_bytes=(-7, 4))
    assert kernel_ready(one, "x").strides_bytes == (12, 4)


def test_scales_may_be_column_major() -> None:
    found = view(np.arange(12, dtype=np.float32).reshape(3, 4).T, "x_scale")
    assert kernel_ready(found, "x_scale", column_stride=True).pointer == found.pointer
    assert kernel_ready(found, "x_scale").pointer != found.pointer
    reverse = view(np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1], "x_scale")
    assert kernel_ready(reverse, "x_scale", column_stride=True).pointer != reverse.pointer


@pytest.mark.parametrize(
    ("pointer", "strides"), [(4096, (64, 4)), (4097, (32, 2)), (4096, (-32, 2)), (4096, (33, 2))]
)
def test_cuda_arrays_are_never_copied_behind_the_callers_back(
    pointer: int, strides: tuple[int, int]
) -> None:
    found = ArrayView(pointer, (3, 16), strides, "bfloat16", ("cuda", 0), "torch", None)
    with pytest.raises(ConfigError) as caught:
        kernel_ready(found, "y")
    for part in ("y has shape (3, 16)", str(strides), f"{pointer:#x}", "bfloat16", "2 bytes"):
        assert part in str(caught.value)
    good = replace(found, pointer=4096, strides_bytes=(64, 2))
    assert kernel_ready(good, "y") == good


def test_copies_keep_the_callers_kind_and_outlive_the_original() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    copy = copied(view(tensor, "x"))
    assert copy.kind == "torch"
    want = tensor.numpy().copy()
    tensor.zero_()
    assert_same_bits(as_numpy(copy), want, "copy")


# ---- as_float32 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("index", [np.s_[:], np.s_[:, ::2], np.s_[:0]])
def test_narrow_floats_widen_exactly(dtype: str, index: Any) -> None:
    values = (np.linspace(-3, 3, 24).reshape(4, 6) ** 3).astype(
        np.dtype(getattr(ml_dtypes, dtype, dtype))
    )
    values[0, 0] = np.inf
    word = torch.from_numpy(values.view(np.int16).copy()).view(getattr(torch, dtype))
    for array, kind in ((values[index], "numpy"), (word[index], "torch")):
        wide = as_float32(view(array, "topk_weights"))
        assert (wide.dtype, wide.kind) == ("float32", kind)
        assert_same_bits(as_numpy(wide), values[index].astype(np.float32), "widened")
        assert fits_kernels(plain_strides(wide))


def test_float32_is_left_where_it_is() -> None:
    found = view(np.zeros((2, 2), np.float32), "topk_weights")
    assert as_float32(found) is found


# ---- on a GPU ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_on_a_gpu(dtype: str) -> None:
    values = payload_fp8(np.arange(3), 8).astype(numpy_dtype(dtype))
    word = torch.from_numpy(values.reshape(-1).view(np.uint8).copy()).cuda()
    array = wrap(word.data_ptr(), (3, 8), dtype, "torch", word, ("cuda", 0))
    found = view(array, "x")
    assert (found.pointer, found.dtype, found.device) == (word.data_ptr(), dtype, ("cuda", 0))
    gone = weakref.ref(word)
    del word
    gc.collect()
    assert gone() is not None
    back = array.view(torch.uint8).cpu().numpy().reshape(-1).view(values.dtype).reshape(3, 8)
    assert_same_bits(back, values, "GPU")
    empty = wrap(0, (0, 8), dtype, "torch", None, ("cuda", 0))
    assert (tuple(empty.shape), view(empty, "x").device) == ((0, 8), ("cuda", 0))
    if dtype in ("bfloat16", "float16"):
        wide = as_float32(view(array.t(), "w"), stream=torch.cuda.current_stream().cuda_stream)
        assert wide.strides_bytes == (12, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_on_a_gpu(dtype: str) -> None:
    import cupy

    memory = cupy.zeros(3 * 8 * 8, np.uint8)
    array = wrap(memory.data.ptr, (3, 8), dtype, "cupy", memory, ("cuda", 0))
    found = view(array, "x")
    shown = "uint8" if dtype == "float8_e4m3fn" else dtype
    assert (found.pointer, found.dtype, found.kind) == (memory.data.ptr, shown, "cupy")
    assert found.device == ("cuda", 0)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is not None

    class Foreign:
        __cuda_array_interface__ = {"version": 3, "shape": (4,), "typestr": "<f4", "strides": None,
                                    "data": (array.data.ptr, False), "stream": 1}  # fmt: skip

    other = view(Foreign(), "x")
    assert (other.device, other.kind, other.stream) == (("cuda", 0), "cupy", 1)
