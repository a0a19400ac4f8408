"""Any caller's array as a raw view: address, shape, strides, element type, device.

numpy, torch and CuPy arrays are read through their own attributes, because bfloat16 and fp8 do
not survive the exchange protocols (torch says ``<V2`` for bfloat16 in
``__cuda_array_interface__``, DLPack consumers crash on what they do not know). Everything else
comes through ``__cuda_array_interface__`` or ``__dlpack__``, plain element types only.

torch and CuPy are looked up among the modules that the caller has loaded and never imported here:
an object of theirs cannot exist without them.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moecomm import dlpack, dtypes
from moecomm.dlpack import Device, contiguous_strides
from moecomm.errors import ConfigError, DtypeError

Kind = Literal["numpy", "torch", "cupy"]


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies. Valid for as long as the view lives, because it holds ``owner``.

    Attributes:
        pointer: address of element 0; means nothing when an extent is 0.
        shape: extents.
        strides_bytes: one a dimension; may be 0 or negative.
        dtype: name of the element type, in the table of ``dtypes`` or not (``"int16"``).
        device: ``"cpu"`` or ``("cuda", index)``.
        kind: what the caller works with, and gets back. Arrays that come through an exchange
            protocol count as numpy (CPU) or CuPy (CUDA).
        owner: what keeps the memory alive.
        writable: whether it may be written to; a DLPack capsule cannot say, so those may not.
        stream: CUDA stream whose earlier work must come before ours, from version 3 of
            ``__cuda_array_interface__``; ``None``: the caller's current stream, as usual.
    """

    pointer: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    device: Device
    kind: Kind
    owner: object
    writable: bool = True
    stream: int | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def device_text(device: Device) -> str:
    """``"cpu"`` or ``"cuda:0"``, as people write it."""
    return device if isinstance(device, str) else f"cuda:{device[1]}"


def view(array: Any, name: str, *, stream: int | None = None) -> ArrayView:
    """Look at ``array`` in place. ``name`` is what messages call it.

    ``stream`` is handed to a CUDA ``__dlpack__`` producer as the stream that will read it.

    Raises:
        DtypeError: not an array, or an exchange protocol with an element type it cannot carry.
        ConfigError: a torch tensor that requires grad while grad mode is on, or that has no
            plain memory (sparse, meta, fake); a masked array; a device other than CPU and CUDA.
    """
    if isinstance(array, np.ndarray):
        return _view_numpy(array, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return _view_torch(array, name, torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return _view_cupy(array)
    if getattr(array, "__cuda_array_interface__", None) is not None:
        return _view_cuda_interface(array, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _view_dlpack(array, name, stream)
    raise DtypeError(
        f"{name} is a {type(array).__name__}: must be an array (numpy, torch, CuPy, or anything "
        "with __dlpack__ or __cuda_array_interface__)"
    )


def kind_of(array: Any, device: Device) -> Kind:
    """What ``view`` will call the kind of ``array``, if it is an array on ``device``."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return "torch"
    return "numpy" if device == "cpu" else "cupy"


def _view_numpy(array: np.ndarray[Any, Any], name: str) -> ArrayView:
    if isinstance(array, np.ma.MaskedArray):
        raise ConfigError(f"{name} is a masked array: masks are not looked at; fill it first")
    return ArrayView(
        pointer=array.ctypes.data,
        shape=array.shape,
        strides_bytes=array.strides,
        dtype=dtypes.name_of(array.dtype),
        device="cpu",
        kind="numpy",
        owner=array,
        writable=array.flags.writeable,
    )


def _view_torch(tensor: Any, name: str, torch: Any) -> ArrayView:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            f"{name} requires grad: MoeComm's halves are not differentiable and would drop its "
            f"gradient without a word; call under torch.no_grad(), pass {name}.detach(), or use "
            "moecomm.torch.TorchOps"
        )
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}: must be a strided tensor "
            "on a CPU or CUDA GPU"
        )
    if tensor.is_neg():  # the sign is not in memory yet
        tensor = tensor.resolve_neg()
    pointer = _torch_pointer(tensor, torch)
    if not pointer and tensor.numel():
        raise ConfigError(f"{name} is a {type(tensor).__name__}, without memory of its own")
    step = tensor.element_size()
    return ArrayView(
        pointer=pointer,
        shape=tuple(tensor.shape),
        strides_bytes=tuple(s * step for s in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device="cpu" if tensor.device.type == "cpu" else ("cuda", tensor.device.index),
        kind="torch",
        owner=tensor,
    )


def _torch_pointer(tensor: Any, torch: Any) -> int:
    """Address of the first element, 0 where a subclass (fake, distributed) has no memory."""
    if type(tensor) is torch.Tensor:
        return int(tensor.data_ptr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fake tensor warns and says 0
        try:
            return int(tensor.data_ptr())
        except RuntimeError:
            return 0


def _view_cupy(array: Any) -> ArrayView:
    return ArrayView(
        pointer=array.data.ptr,
        shape=tuple(array.shape),
        strides_bytes=tuple(array.strides),
        dtype=dtypes.name_of(array.dtype),
        device=("cuda", array.device.id),
        kind="cupy",
        owner=array,
    )


def _view_cuda_interface(array: Any, name: str) -> ArrayView:
    found = array.__cuda_array_interface__
    if found.get("mask") is not None:
        raise ConfigError(f"{name} has a mask: masks are not looked at; fill it first")
    dtype = np.dtype(found["typestr"])
    if dtype.kind not in "iuf":
        raise DtypeError(
            f"{name}: element type {found['typestr']!r} of its __cuda_array_interface__ is not a "
            "plain integer or float; pass bfloat16 and fp8 as torch or CuPy arrays"
        )
    pointer, read_only = found["data"]
    shape = tuple(found["shape"])
    return ArrayView(
        pointer=pointer or 0,
        shape=shape,
        strides_bytes=found.get("strides") or contiguous_strides(shape, dtype.itemsize),
        dtype=dtypes.name_of(dtype),
        device=("cuda", _cuda_device_of(pointer or 0)),
        kind="cupy",
        owner=array,
        writable=not read_only,
        stream=found.get("stream"),
    )


def _cuda_device_of(pointer: int) -> int:
    """The interface has no device: the driver knows it. An empty array is wherever we are."""
    import cupy

    if not pointer:
        return int(cupy.cuda.runtime.getDevice())
    return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device)


def _view_dlpack(array: Any, name: str, stream: int | None) -> ArrayView:
    found = dlpack.describe(array, name, stream)
    return ArrayView(
        pointer=found.pointer,
        shape=found.shape,
        strides_bytes=found.strides_bytes,
        dtype=found.dtype,
        device=found.device,
        kind="numpy" if found.device == "cpu" else "cupy",
        owner=found.capsule,
        writable=False,
    )
