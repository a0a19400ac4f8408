"""The table of element types."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from moecomm import dtypes
from moecomm.config import COMBINE_DTYPES, DISPATCH_DTYPES
from moecomm.errors import ConfigError, DtypeError


def test_codes_are_what_device_code_says() -> None:
    codes = {name: dtypes.code(name) for name in DISPATCH_DTYPES}
    assert codes == {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3}


def test_every_configurable_dtype_has_a_size() -> None:
    for name in {*DISPATCH_DTYPES, *COMBINE_DTYPES}:
        assert dtypes.itemsize(name) == dtypes.numpy_dtype(name).itemsize


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_numpy_and_torch_agree_on_name_and_size(name: str) -> None:
    import torch

    assert dtypes.name_of(dtypes.numpy_dtype(name)) == name
    assert dtypes.torch_dtype(torch, name).itemsize == dtypes.itemsize(name)
    assert str(dtypes.torch_dtype(torch, name)) == f"torch.{name}"
    assert dtypes.word_dtype(name).itemsize == dtypes.itemsize(name)
    assert dtypes.word_dtype(name).kind == "u"


def test_ml_dtypes_are_the_real_ones() -> None:
    assert dtypes.numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert dtypes.numpy_dtype("float8_e4m3fn") == ml_dtypes.float8_e4m3fn
    assert dtypes.name_of(np.dtype(ml_dtypes.float8_e5m2)) == "float8_e5m2"


def test_swapped_bytes_never_pass_for_the_type() -> None:
    swapped = np.dtype(np.float32).newbyteorder()
    assert dtypes.name_of(swapped) != "float32"
    assert dtypes.name_of(np.dtype("int16")) == "int16"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"'float64': must be one of bfloat16"):
        dtypes.itemsize("float64")
    with pytest.raises(DtypeError, match="'int32': rows are"):
        dtypes.code("int32")


def test_missing_ml_dtypes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert dtypes.numpy_dtype("float16") == np.float16
    with pytest.raises(ConfigError, match="package ml_dtypes"):
        dtypes.numpy_dtype("bfloat16")


def test_torch_without_the_type_is_explained() -> None:
    class OldTorch:
        __version__ = "1.13"

    with pytest.raises(ConfigError, match=r"'float8_e4m3fn': torch 1\.13"):
        dtypes.torch_dtype(OldTorch, "float8_e4m3fn")
