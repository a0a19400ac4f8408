"""Element types: one table that joins names, sizes, codes for device code, numpy and torch.

A name is numpy's and torch's alike: ``"bfloat16"`` is ``ml_dtypes.bfloat16`` and
``torch.bfloat16``. Neither ml_dtypes nor torch is imported before one of their types is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moecomm.errors import ConfigError, DtypeError

# What kernels call the element types that a row can have; `common.cuh` has the same numbers.
BF16: Final = 0
F16: Final = 1
F32: Final = 2
F8E4M3: Final = 3
BITS8: Final = 4  # one byte or two of which only a codec knows the meaning
BITS16: Final = 5


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. ``code`` is its number in device code, ``None`` if rows never have it."""

    name: str
    itemsize: int  # bytes
    code: int | None = None
    in_ml_dtypes: bool = False


DTYPES: Final[dict[str, Dtype]] = {
    dtype.name: dtype
    for dtype in (
        Dtype("bfloat16", 2, BF16, in_ml_dtypes=True),
        Dtype("float16", 2, F16),
        Dtype("float32", 4, F32),
        Dtype("float8_e4m3fn", 1, F8E4M3, in_ml_dtypes=True),
        Dtype("float8_e5m2", 1, in_ml_dtypes=True),
        Dtype("int8", 1),
        Dtype("int16", 2),
        Dtype("int32", 4),
        Dtype("int64", 8),
        Dtype("uint8", 1),
        Dtype("uint16", 2),
        Dtype("uint32", 4),
        Dtype("uint64", 8),
    )
}

_WORDS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def lookup(name: str) -> Dtype:
    """The table's entry.

    Raises:
        DtypeError: no such name.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise DtypeError(f"dtype {name!r}: must be one of {', '.join(DTYPES)}") from None


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return lookup(name).itemsize


def code(name: str) -> int:
    """The number that device code knows the element type by.

    Raises:
        DtypeError: rows never have this type.
    """
    number = lookup(name).code
    if number is None:
        raise DtypeError(f"dtype {name!r}: rows are bfloat16, float16, float32 or float8_e4m3fn")
    return number


def word_dtype(name: str) -> np.dtype[Any]:
    """The unsigned integer of the same size: moves an element's bits without knowing its type."""
    return np.dtype(_WORDS[lookup(name).itemsize])


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype; bfloat16 and fp8 are ml_dtypes' types.

    Raises:
        DtypeError: no such name.
        ConfigError: the type is ml_dtypes' and that package is not installed.
    """
    if not lookup(name).in_ml_dtypes:
        return np.dtype(name)
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise ConfigError(
            f"dtype {name!r}: numpy has it only with the package ml_dtypes installed"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a numpy dtype, in this table or not (``"int16"``, or ``">f4"`` where the byte
    order is not this machine's, so that it can never pass for ``"float32"``)."""
    return dtype.name if dtype.isnative else dtype.str


def torch_dtype(torch: Any, name: str) -> Any:
    """The dtype of this name in the module ``torch``.

    Raises:
        DtypeError: no such name in the table.
        ConfigError: this torch is too old to have it.
    """
    lookup(name)
    found = getattr(torch, name, None)
    if found is None:
        raise ConfigError(f"dtype {name!r}: torch {torch.__version__} does not have it")
    return found
