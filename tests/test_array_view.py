"""Looking at callers' arrays: the same bits, whoever made them; everything else refused."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from payload import assert_same_bits, payload, payload_fp8

from moecomm import arrays
from moecomm.arrays import as_numpy, view
from moecomm.errors import ConfigError, DtypeError

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "int64"]


def sample(dtype: str) -> np.ndarray:
    tokens = np.arange(6)
    if dtype == "float8_e4m3fn":
        return payload_fp8(tokens, 8)
    if dtype.startswith("int"):
        return payload(tokens, 8, "float32").astype(dtype)
    return payload(tokens, 8, dtype)


def to_torch(array: np.ndarray) -> torch.Tensor:
    word = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize]
    return torch.from_numpy(array.view(word).copy()).view(getattr(torch, array.dtype.name))


class OnlyDlpack:
    """An array of a library that we know nothing about."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.inner.__dlpack_device__()
        return device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", [lambda a: a, to_torch], ids=["numpy", "torch"])
def test_view_reads_the_same_bits(dtype: str, maker: Any) -> None:  # G05
    array = sample(dtype)
    found = view(maker(array), "x")
    assert found.dtype == dtype
    assert found.shape == (6, 8)
    assert found.strides_bytes == (8 * array.itemsize, array.itemsize)
    assert found.device == "cpu"
    assert found.kind == ("numpy" if maker(array) is array else "torch")
    assert found.writable
    assert_same_bits(as_numpy(found), array, "round trip")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [np.s_[::2], np.s_[:, ::3], np.s_[1:4, 2:5], np.s_[:0], np.s_[3]])
def test_strides_are_kept(dtype: str, index: Any) -> None:
    array = sample(dtype)
    for made in (array, to_torch(array)):
        found = view(made[index], "x")
        assert found.shape == array[index].shape
        assert_same_bits(as_numpy(found), array[index], "strided")


def test_transposed_and_negative_and_zero_strides() -> None:
    array = sample("bfloat16")
    assert_same_bits(as_numpy(view(array.T, "x")), array.T, "transposed")
    assert_same_bits(as_numpy(view(array[::-1, ::-1], "x")), array[::-1, ::-1], "reversed")
    assert_same_bits(as_numpy(view(to_torch(array).t(), "x")), array.T, "torch transposed")
    spread = to_torch(array)[:1].expand(4, 8)
    assert view(spread, "x").strides_bytes == (0, 2)
    assert_same_bits(as_numpy(view(spread, "x")), np.tile(array[:1], (4, 1)), "expanded")


def test_pointer_is_the_first_element() -> None:
    array = sample("float32")
    assert view(array[2:, 3:], "x").pointer == array.ctypes.data + 4 * (2 * 8 + 3)
    tensor = to_torch(array)
    assert view(tensor[2:, 3:], "x").pointer == tensor.data_ptr() + 4 * (2 * 8 + 3)


def test_read_only_memory_is_seen_as_such() -> None:
    array = sample("float32")
    array.flags.writeable = False
    found = view(array, "x")
    assert not found.writable
    assert not as_numpy(found).flags.writeable


def test_unsupported_element_types_have_names() -> None:
    assert view(np.zeros(2, np.int16), "x").dtype == "int16"
    assert view(np.zeros(2, ">f4"), "x").dtype == ">f4"
    assert view(np.zeros(2, ml_dtypes.float8_e5m2), "x").dtype == "float8_e5m2"
    assert view(torch.zeros(2, dtype=torch.bool), "x").dtype == "bool"


@pytest.mark.parametrize("thing", [None, [1.0, 2.0], 3, "x", np.float32(1), object()])
def test_what_is_no_array(thing: Any) -> None:
    with pytest.raises(DtypeError, match=rf"topk_idx is a {type(thing).__name__}: must be an arr"):
        view(thing, "topk_idx")


def test_masked_array_is_refused() -> None:
    with pytest.raises(ConfigError, match="masked"):
        view(np.ma.masked_array(np.zeros(2), [True, False]), "x")


# ---- torch ---------------------------------------------------------------------------------


def test_gradients_would_be_lost_so_they_are_refused() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ConfigError, match=r"topk_weights requires grad.*no_grad"):
        view(weight, "topk_weights")
    with pytest.raises(ConfigError, match="requires grad"):
        view(weight * 2, "topk_weights")
    with pytest.raises(ConfigError, match="requires grad"):
        view(torch.nn.Parameter(torch.ones(2)), "x")
    with torch.no_grad():
        assert view(weight, "topk_weights").pointer == weight.data_ptr()
    with torch.inference_mode():
        assert view(weight, "topk_weights").pointer == weight.data_ptr()
    assert view(weight.detach(), "topk_weights").pointer == weight.data_ptr()


def test_tensor_subclasses_are_tensors() -> None:
    class Mine(torch.Tensor):
        pass

    found = view(torch.ones(2, 3).as_subclass(Mine), "x")
    assert (found.kind, found.shape) == ("torch", (2, 3))


def test_tensors_without_plain_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        view(torch.eye(3).to_sparse(), "x")
    with pytest.raises(ConfigError, match="meta"):
        view(torch.empty(3, device="meta"), "x")


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(ConfigError, match="FakeTensor"):
        view(torch.empty(3), "x")


def test_lazy_negation_is_resolved() -> None:
    lazy = torch.complex(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])).conj().imag
    assert lazy.is_neg()
    assert as_numpy(view(lazy, "x")).tolist() == [-1, -2, -3]


def test_torch_and_others_stay_unloaded_for_numpy_users() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np, moecomm.arrays as a, moecomm.checks_dispatch, moecomm.reference\n"
        "a.view(np.zeros(3), 'x'); a.wrap(8, (0, 2), 'float32', 'numpy', None)\n"
        "print([m for m in ('torch', 'cupy', 'jax', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# ---- DLPack --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "int64"])
@pytest.mark.parametrize("index", [np.s_[:], np.s_[::2], np.s_[:, ::3], np.s_[:0], np.s_[:, :0]])
def test_dlpack_carries_plain_types(dtype: str, index: Any) -> None:
    array = sample(dtype)
    for inner in (array[index], to_torch(array)[index]):
        found = view(OnlyDlpack(inner), "x")
        assert (found.dtype, found.kind, found.device) == (dtype, "numpy", "cpu")
        assert not found.writable
        assert_same_bits(as_numpy(found), array[index], "dlpack")


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool", "complex64"]
)
def test_dlpack_refuses_what_it_cannot_carry(dtype: str) -> None:  # G05
    tensor = torch.zeros(4, 4).to(getattr(torch, dtype))
    with pytest.raises(ConfigError, match="x: its"):
        view(OnlyDlpack(tensor), "x")


def test_dlpack_errors_of_the_producer_are_passed_on() -> None:  # G08
    with pytest.raises(ConfigError, match="x: its __dlpack__ refuses"):
        view(OnlyDlpack(torch.ones(2, requires_grad=True)), "x")

    class Elsewhere(OnlyDlpack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)  # Metal

    with pytest.raises(ConfigError, match="x is on DLPack device type 8"):
        view(Elsewhere(np.zeros(2)), "x")

    class Wrong(OnlyDlpack):
        def __dlpack__(self, **options: Any) -> Any:
            return "not a capsule"

    with pytest.raises(ConfigError, match="refuses"):
        view(Wrong(np.zeros(2)), "x")


def test_dlpack_holds_the_memory_and_lets_it_go() -> None:  # G08
    class Tracked(np.ndarray):
        pass

    array = np.zeros(1000, np.float32).view(Tracked)
    gone = weakref.ref(array)
    found = view(OnlyDlpack(array), "x")
    del array
    gc.collect()
    assert gone() is not None
    assert as_numpy(found).sum() == 0
    del found
    gc.collect()
    assert gone() is None


def test_ten_thousand_dlpack_views_leave_no_memory_behind() -> None:  # G08
    array = OnlyDlpack(torch.zeros(64, 64))
    view(array, "x")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            view(array, "x")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


# ---- CUDA array interface (no GPU needed to read it) ---------------------------------------


class OnCuda:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (2, 3), "typestr": "<f4", "data": (0, False), **interface
        }  # fmt: skip


@pytest.mark.parametrize("typestr", ["<V2", "|V1", "|b1", "<c8"])
def test_cuda_interface_refuses_what_it_cannot_carry(typestr: str) -> None:
    with pytest.raises(DtypeError, match="x: element type"):
        view(OnCuda(typestr=typestr), "x")


def test_cuda_interface_with_a_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="x has a mask"):
        view(OnCuda(mask=object()), "x")


def test_device_text() -> None:
    assert arrays.device_text("cpu") == "cpu"
    assert arrays.device_text(("cuda", 3)) == "cuda:3"
