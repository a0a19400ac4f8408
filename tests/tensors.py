"""Arrays of the kinds that callers bring: numpy and torch, bit for bit the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import moecomm as mc
from moecomm.dtypes import numpy_dtype

Array = np.ndarray[Any, Any]
_BY_BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}  # what torch takes from numpy as bits


def to_torch(array: Array) -> Any:
    """A torch tensor on the CPU with ``array``'s bits."""
    import torch

    name = array.dtype.name
    words = np.ascontiguousarray(array)
    if name in _BY_BITS:
        words = words.view(_BY_BITS[name])
    return torch.from_numpy(words.copy()).view(getattr(torch, name))


def to_numpy(array: Any) -> Array:
    """What a caller got back, as numpy; numpy arrays stay what they are."""
    if isinstance(array, np.ndarray):
        return array
    name = str(array.dtype).removeprefix("torch.")
    if name not in _BY_BITS:
        return array.numpy()
    words = array.view(getattr(__import__("torch"), np.dtype(_BY_BITS[name]).name))
    return words.numpy().view(numpy_dtype(name))


def received_as_numpy(recv: mc.Received) -> mc.Received:
    """``recv`` with every array as numpy."""
    names = [f.name for f in dataclasses.fields(recv) if f.name != "handle"]
    given = {name: getattr(recv, name) for name in names}
    return dataclasses.replace(
        recv, **{name: None if a is None else to_numpy(a) for name, a in given.items()}
    )
