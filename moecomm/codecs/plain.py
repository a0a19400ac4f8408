"""A codec in plain Python: what it means, bit for bit.

Kernels are compared with this. Numbers are numpy's float32 scalars; bits are Python integers,
negative for the upper half of a signed wire dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.codecs.definition import Codec
from moecomm.dtypes import numpy_dtype, word_dtype
from moecomm.errors import CodecError

Array = NDArray[Any]
Floats = NDArray[np.float32]

NAN_WORDS: Final = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7FFF}
NAN: Final = np.uint32(0x7FC00000).view(np.float32)  # the one NaN that scales and values have


class Plain:
    """The functions of ``codec``, called with Python's numbers and held to what they return.

    Raises (every method): ``CodecError``: the function raises, or returns what it must not.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._functions = codec.frozen
        self._arguments = codec.arguments()
        self._mask = (1 << 8 * codec.itemsize) - 1

    def scale(self, amax: np.float32) -> np.float32:
        """The scale that travels; without ``scale`` 1, which does not."""
        return self._number("scale", amax) if self.codec.scaled else np.float32(1)

    def factor(self, amax: np.float32) -> np.float32:
        """What ``encode`` gets."""
        return self._number("inverse", amax) if self.codec.inverse else self.scale(amax)

    def encode(self, value: np.float32, factor: np.float32) -> int:
        """Bits as they travel, not negative."""
        found: object = self._call("encode", value, factor)
        if isinstance(found, bool) or not isinstance(found, Integral):
            raise self._error("encode", (value, factor), f"returns {found!r}: must be an integer")
        return int(found) & self._mask

    def decode(self, bits: int, scale: np.float32) -> np.float32:
        """The value of ``bits`` as they travel."""
        bits = int(bits)
        if self.codec.signed and bits > self._mask >> 1:
            bits -= self._mask + 1
        return self._number("decode", bits, scale)

    def call(self, name: str, *args: Any) -> Any:
        """``encode`` or another method by the name of its function."""
        return self._number(name, *args) if name == "inverse" else getattr(self, name)(*args)

    def _number(self, name: str, *args: Any) -> np.float32:
        found: object = self._call(name, *args)
        if isinstance(found, bool) or not isinstance(found, Real):
            raise self._error(name, args, f"returns {found!r}: must be a number")
        with np.errstate(all="ignore"):
            number = np.float32(float(found))
        return NAN if np.isnan(number) else number

    def _call(self, name: str, *args: Any) -> Any:
        given = args[: len(self._arguments[name])]
        try:
            with np.errstate(all="ignore"):
                return self._functions[name](*given)
        except Exception as error:
            what = (
                f"raises {type(error).__name__}: {error}; it must have an answer for every number"
            )
            raise self._error(name, args, what) from error

    def _error(self, name: str, args: tuple[Any, ...], what: str) -> CodecError:
        names = self._arguments[name]
        shown = ", ".join(f"{n}={a!s}" for n, a in zip(names, args, strict=False))
        return CodecError(f"codec {self.codec.name}: {name}({shown}) {what}")


def encode_rows(codec: Codec, x: Array) -> tuple[Array, Floats | None]:
    """Encode rows as dispatch does.

    For every block of columns (or the whole row): ``amax`` is the largest ``|x|`` in float32, NaN
    ignored, 0 for a block of nothing else.

    Args:
        x: ``[T, H]`` bfloat16, float16 or float32.

    Returns:
        ``q [T, H]`` of ``wire_dtype`` and ``scale [T, S]`` float32, or ``None``.

    Raises:
        CodecError: a function raises, or returns what it must not.
    """
    plain = plain_of(codec)
    values = np.asarray(x).astype(np.float32)
    num_tokens, hidden = values.shape
    bits = np.zeros((num_tokens, hidden), word_dtype(codec.wire_dtype))
    scales = np.zeros((num_tokens, codec.num_scales(hidden)), np.float32)
    block = codec.block or hidden
    for token in range(num_tokens):
        for number, first in enumerate(range(0, hidden, block)):
            columns = values[token, first : first + block]
            amax = np.fmax.reduce(np.abs(columns), initial=np.float32(0))
            if codec.scaled:
                scales[token, number] = plain.scale(amax)
            factor = plain.factor(amax)
            encode = functools.partial(plain.encode, factor=factor)
            bits[token, first : first + block] = _each(columns, encode)
    return bits.view(numpy_dtype(codec.wire_dtype)), scales if codec.scaled else None


def decode_rows(codec: Codec, q: Array, scale: Array | None, dtype: str = "float32") -> Array:
    """Decode rows as dispatch does: in float32, then rounded to nearest even.

    Args:
        q: ``[..., H]`` of ``wire_dtype``.
        scale: ``[..., S]`` float32; ``None`` without scales.
        dtype: ``float32``, ``bfloat16`` or ``float16``; every NaN is the same one.

    Raises: as ``encode_rows``.
    """
    plain = plain_of(codec)
    q = np.asarray(q)
    bits = q.view(word_dtype(codec.wire_dtype)).reshape(math.prod(q.shape[:-1]), q.shape[-1])
    out = np.zeros(bits.shape, np.float32)
    block = codec.block or q.shape[-1]
    scales = np.ones((len(bits), -(-q.shape[-1] // block)), np.float32)
    if scale is not None:
        scales = np.asarray(scale, np.float32).reshape(scales.shape)
    for row in range(len(bits)):
        for number, first in enumerate(range(0, q.shape[-1], block)):
            columns = bits[row, first : first + block]
            decode = functools.partial(plain.decode, scale=scales[row, number])
            out[row, first : first + block] = _each(columns, decode)
    with np.errstate(over="ignore"):  # what is too large for the dtype is infinity
        rounded = out.astype(numpy_dtype(dtype))
    rounded.view(word_dtype(dtype))[np.isnan(out)] = NAN_WORDS[dtype]
    return rounded.reshape(q.shape)


@functools.lru_cache(maxsize=64)
def plain_of(codec: Codec) -> Plain:
    """``Plain(codec)``, kept."""
    return Plain(codec)


def _each(columns: Array, function: Callable[[Any], Any]) -> list[Any]:
    """``function`` of every element, called once for those that are equal bit for bit."""
    words = columns.view(f"u{columns.itemsize}")
    known: dict[int, Any] = {}
    for word, value in zip(words.tolist(), columns, strict=True):
        if word not in known:
            known[word] = function(value)
    return [known[word] for word in words.tolist()]
