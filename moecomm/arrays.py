"""Views into kernels' form, and raw memory back into arrays of the caller's kind.

``view`` (here from ``array_view``) looks at what a caller handed in; ``kernel_ready`` puts it
into the form that kernels read; ``wrap`` and ``empty_like_kind`` make what a caller gets back.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from typing import Any, Final

import numpy as np

from moecomm import dtypes
from moecomm.array_view import ArrayView, Kind, device_text, kind_of, view
from moecomm.dlpack import Device, contiguous_strides
from moecomm.errors import ConfigError

__all__ = [
    "ArrayView",
    "Device",
    "Kind",
    "as_float32",
    "as_numpy",
    "contiguous_strides",
    "copied",
    "device_text",
    "empty_like_kind",
    "fits_kernels",
    "kernel_ready",
    "kind_of",
    "misfit_text",
    "plain_strides",
    "view",
    "wrap",
]

# torch.from_numpy knows these in every version; `.view` then says what the bits mean.
_TORCH_WORDS: Final = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}


class _HostMemory:
    """numpy's array interface over an address, holding what owns the memory."""

    def __init__(self, found: ArrayView, typestr: str) -> None:
        self.owner = found.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": found.shape,
            "typestr": typestr,
            "data": (found.pointer, not found.writable),
            "strides": found.strides_bytes,
        }


class _CudaMemory:
    """CUDA's array interface over an address, as bytes, holding what owns the memory.

    Version 2, which names no stream: consumers then synchronise nothing.
    """

    def __init__(self, pointer: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
        }


def as_numpy(found: ArrayView) -> np.ndarray[Any, Any]:
    """A view on the CPU as a numpy array over the same memory, whose owner it keeps alive.

    Raises:
        DtypeError: the element type is not in the table of ``dtypes``.
    """
    dtype = dtypes.numpy_dtype(found.dtype)
    if found.num_elements == 0:  # the address of nothing may be null, which numpy refuses
        return np.empty(found.shape, dtype)
    return _words(found, dtypes.word_dtype(found.dtype).str).view(dtype)


def copied(found: ArrayView) -> ArrayView:
    """A C-ordered, aligned, writable copy of a view on the CPU; ``kind`` stays the caller's."""
    copy = np.array(as_numpy(found), order="C", copy=True)
    return replace(
        found, pointer=copy.ctypes.data, strides_bytes=copy.strides, owner=copy, writable=True
    )


def as_float32(found: ArrayView, *, stream: int | None = None) -> ArrayView:
    """The values as float32 ``[...]``; the view itself where it has them already.

    On CUDA the caller's library converts, on ``stream`` (``None``: its current one), into memory
    that the returned view owns.
    """
    if found.dtype == "float32":
        return found
    if found.device == "cpu":
        values = as_numpy(found).astype(np.float32, order="C")
        return replace(view(values, "values"), kind=found.kind)
    if found.kind == "torch":
        torch = importlib.import_module("torch")
        with _on_stream(torch, stream, found.device):
            owner: Any = found.owner
            values = owner.detach().to(torch.float32, memory_format=torch.contiguous_format)
            return view(values, "values")
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(found.device[1]), _on_cupy_stream(cupy, stream):
        return view(cupy.asarray(found.owner).astype(np.float32, order="C"), "values")


def kernel_ready(found: ArrayView, name: str, *, column_stride: bool = False) -> ArrayView:
    """``found`` as kernels read it (see ``fits_kernels``): in place, else copied on the CPU.

    Raises:
        ConfigError: a CUDA array that kernels cannot read in place.
    """
    found = plain_strides(found)
    if fits_kernels(found, column_stride=column_stride):
        return found
    if found.device == "cpu":
        return copied(found)
    raise ConfigError(f"{misfit_text(found, name)}; pass a contiguous copy")


def plain_strides(found: ArrayView) -> ArrayView:
    """The same elements, with the strides over extents of 0 or 1, which mean nothing, set to what
    C order has there."""
    if min(found.shape, default=1) > 1:
        return found
    plain = contiguous_strides(found.shape, dtypes.itemsize(found.dtype))
    empty = found.num_elements == 0
    strides = tuple(
        c if empty or extent == 1 else s
        for s, c, extent in zip(found.strides_bytes, plain, found.shape, strict=True)
    )
    return replace(found, strides_bytes=strides)


def fits_kernels(found: ArrayView, *, column_stride: bool = False) -> bool:
    """Whether kernels can use the memory as it lies; ``found`` has plain strides.

    They need neighbours of the last dimension next to each other, other strides that are
    multiples of the element and not negative, and a first element on a multiple of its own size.
    ``column_stride`` frees the last dimension to the others' rule.
    """
    step, strides = dtypes.itemsize(found.dtype), found.strides_bytes
    aligned = found.num_elements == 0 or found.pointer % step == 0
    apart = all(s >= 0 and s % step == 0 for s in strides)
    return aligned and apart and (column_stride or strides[-1] == step)


def misfit_text(found: ArrayView, name: str) -> str:
    """What is wrong with an array that does not fit, and the rule."""
    step = dtypes.itemsize(found.dtype)
    return (
        f"{name} has shape {found.shape} and strides {found.strides_bytes} bytes at address "
        f"{found.pointer:#x}: {found.dtype} must start on a multiple of {step} bytes, with rows "
        f"without gaps and row strides in multiples of {step} bytes"
    )


def wrap(
    pointer: int,
    shape: tuple[int, ...],
    dtype: str,
    kind: Kind,
    owner: object,
    device: Device = "cpu",
) -> Any:
    """A C-ordered array of ``kind`` over memory that exists already.

    ``owner`` lives at least as long as the array and everything made from it. CuPy has no fp8:
    there it comes as uint8.

    Raises:
        ConfigError: ``kind`` has no arrays on ``device``, or not of this element type.
    """
    size = dtypes.itemsize(dtype)
    found = ArrayView(pointer, shape, contiguous_strides(shape, size), dtype, device, kind, owner)
    if found.num_elements == 0:  # nothing to share, and null addresses are refused here and there
        return empty_like_kind(kind, shape, dtype, device)
    if device != "cpu":
        return _wrap_cuda(found, found.num_elements * size, device[1])
    if kind == "torch":
        torch = importlib.import_module("torch")
        words = torch.from_numpy(_words(found, _TORCH_WORDS[size]))
        return words.view(dtypes.torch_dtype(torch, dtype))
    _only_numpy_on_cpu(kind)
    return as_numpy(found)


def empty_like_kind(
    kind: Kind,
    shape: tuple[int, ...],
    dtype: str,
    device: Device,
    *,
    stream: int | None = None,
) -> Any:
    """A new C-ordered array of ``kind``, contents undefined.

    ``stream``: the CUDA stream that will write it (``None``: the current one). torch ties memory
    to streams, and may be told to fill every new tensor.

    Raises:
        ConfigError: ``kind`` has no arrays on ``device``, or not of this element type.
    """
    if kind == "torch":
        torch = importlib.import_module("torch")
        found = dtypes.torch_dtype(torch, dtype)
        with _on_stream(torch, stream, device):
            return torch.empty(shape, dtype=found, device=device_text(device))
    if device != "cpu":
        cupy = _only_cupy_on_cuda(kind)
        with cupy.cuda.Device(device[1]), _on_cupy_stream(cupy, stream):
            return cupy.empty(shape, _cupy_dtype(dtype))
    _only_numpy_on_cpu(kind)
    return np.empty(shape, dtypes.numpy_dtype(dtype))


def _on_stream(torch: Any, stream: int | None, device: Device) -> Any:
    """A context in which torch uses ``stream`` of ``device``; ``None``: its current one."""
    if stream is None or device == "cpu":
        return contextlib.nullcontext()
    if stream in (0, 1):  # ExternalStream(0) would be a new stream
        return torch.cuda.stream(torch.cuda.default_stream(device[1]))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device[1]))


class _Stream:
    """A stream handle as CuPy takes it from other libraries."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _on_cupy_stream(cupy: Any, stream: int | None) -> Any:
    """A context in which CuPy uses ``stream`` of the current device; ``None``: its current one."""
    if stream is None or stream == cupy.cuda.get_current_stream().ptr:
        return contextlib.nullcontext()
    if stream in (0, 1):
        return cupy.cuda.Stream.null
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Stream(stream))
    return cupy.cuda.ExternalStream(stream)


def _words(found: ArrayView, typestr: str) -> np.ndarray[Any, Any]:
    """The memory of a view as integers of its size: needs nothing that knows the element type."""
    return np.asarray(_HostMemory(found, typestr))


def _wrap_cuda(found: ArrayView, num_bytes: int, index: int) -> Any:
    if found.kind == "torch":
        torch = importlib.import_module("torch")
        memory = _CudaMemory(found.pointer, num_bytes, found.owner)
        raw = torch.as_tensor(memory, device=f"cuda:{index}")
        return raw.view(dtypes.torch_dtype(torch, found.dtype)).view(found.shape)
    cupy = _only_cupy_on_cuda(found.kind)
    unowned = cupy.cuda.UnownedMemory(found.pointer, num_bytes, found.owner, index)
    start = cupy.cuda.MemoryPointer(unowned, 0)
    return cupy.ndarray(found.shape, _cupy_dtype(found.dtype), memptr=start)


def _cupy_dtype(name: str) -> np.dtype[Any]:
    return dtypes.numpy_dtype("uint8" if name.startswith("float8") else name)


def _only_cupy_on_cuda(kind: Kind) -> Any:
    if kind != "cupy":
        raise ConfigError(f"{kind} arrays do not live on a GPU: must be torch or CuPy")
    return importlib.import_module("cupy")


def _only_numpy_on_cpu(kind: Kind) -> None:
    if kind != "numpy":
        raise ConfigError(f"{kind} arrays do not live on a CPU: must be torch or numpy")
