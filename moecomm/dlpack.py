"""Reading where an array lies from its DLPack capsule, without taking the array over.

The capsule is looked into and kept, never renamed to "used": its producer's own destructor
releases the array when the capsule goes, exactly once. Importing through numpy or CuPy instead
would need one of them per device, and some versions crash on element types they do not know.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, Literal

from moecomm.errors import ConfigError, DtypeError

Device = Literal["cpu"] | tuple[Literal["cuda"], int]

_HOST_KINDS: Final = (1, 3)  # CPU, CUDA pinned host memory
_CUDA_KINDS: Final = (2, 13)  # CUDA, CUDA managed memory
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_PLAIN: Final = {_INT: "int", _UINT: "uint", _FLOAT: "float"}


class _Descriptor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, the first member of what a "dltensor" capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # elements; null: C order
        ("byte_offset", ctypes.c_uint64),
    )


# A prototype of our own: `ctypes.pythonapi` hands everyone the same function object, and other
# packages set its argument types too.
_capsule_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class Described:
    """What a capsule says. The memory lives at least as long as ``capsule``."""

    pointer: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    device: Device
    capsule: object


def describe(array: Any, name: str, stream: int | None) -> Described:
    """Ask ``array`` for a capsule and read it.

    ``stream`` is the CUDA stream that will read the array; ``None`` is the legacy default
    stream. The producer orders its own work before that stream.

    Raises:
        DtypeError: the element type is not a plain integer or float.
        ConfigError: the array is on some other kind of device, or its producer refuses.
    """
    device = _device(array, name)
    try:
        capsule = array.__dlpack__() if device == "cpu" else array.__dlpack__(stream=stream or 1)
        found = _Descriptor.from_address(_capsule_pointer(capsule, b"dltensor"))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its __dlpack__ refuses to export it: {error}") from error
    return Described(
        pointer=(found.data or 0) + found.byte_offset,
        shape=tuple(found.shape[i] for i in range(found.ndim)),
        strides_bytes=_strides_bytes(found),
        dtype=_dtype(found, name),
        device=device,
        capsule=capsule,
    )


def _device(array: Any, name: str) -> Device:
    kind, index = array.__dlpack_device__()
    if kind in _HOST_KINDS:
        return "cpu"
    if kind in _CUDA_KINDS:
        return ("cuda", int(index))
    raise ConfigError(f"{name} is on DLPack device type {int(kind)}: must be on a CPU or CUDA GPU")


def _dtype(found: _Descriptor, name: str) -> str:
    family = _PLAIN.get(found.type_code)
    if family is None or found.type_lanes != 1:
        known = {_BFLOAT: "bfloat16", _COMPLEX: "complex", _BOOL: "bool"}
        told = known.get(found.type_code, f"of type code {found.type_code}")
        raise DtypeError(
            f"{name}: its elements are {told} ({found.type_bits} bits) behind __dlpack__, which "
            "is taken for plain integers and floats only; pass bfloat16 and fp8 as a torch "
            "tensor, a CuPy array or a numpy array of ml_dtypes (numpy.asarray of a JAX array)"
        )
    return f"{family}{found.type_bits}"


def _strides_bytes(found: _Descriptor) -> tuple[int, ...]:
    itemsize = found.type_bits // 8
    shape = [found.shape[i] for i in range(found.ndim)]
    if not found.strides:
        return contiguous_strides(tuple(shape), itemsize)
    return tuple(found.strides[i] * itemsize for i in range(found.ndim))


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-ordered array."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
