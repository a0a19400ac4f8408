"""Do compiled functions of a codec compute what plain Python does? Asked before they are used.

numba and Python agree on most of what a codec writes down, and differ in corners: integers that
grow without end, float64 where a float32 meets an integer, NaN in ``min``. A few thousand calls
show such a place, and cost some milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.codecs.definition import Codec
from moecomm.codecs.plain import plain_of
from moecomm.errors import CodecError

Array = NDArray[Any]
# A function by name on one uint32 array an argument (floats by their bits) → uint32 results.
Run = Callable[[str, list[Array]], Array]

TINY, HUGE = 1e-45, 3.4028235e38
AMAXES: Final = (0.0, TINY, 1e-38, 1e-30, 0.0078125, 1.0, 127.0, 448.0, 60000.0, HUGE, np.inf)
SHARES: Final = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1 / 3, 0.25 / 127, 1.5 / 127, 2.5 / 127)
MORE: Final = 24  # random numbers beside those


@dataclass(frozen=True, slots=True)
class Expected:
    """``arguments`` and results of one function, uint32 each (floats by their bits)."""

    arguments: list[Array]
    results: Array


@functools.lru_cache(maxsize=64)
def expected(codec: Codec) -> dict[str, Expected]:
    """Function → what plain Python says.

    Raises:
        CodecError: a function raises, or returns what it must not.
    """
    plain = plain_of(codec)
    found = {}
    for name, names in codec.arguments().items():
        if getattr(codec, name) is None:
            continue
        calls = list(_calls(codec, name))
        results = [plain.call(name, *call) for call in calls]
        columns = [_words(column) for column in list(zip(*calls, strict=True))[: len(names)]]
        found[name] = Expected(columns, _words(results))
    return found


def prove(codec: Codec, run: Run, where: str) -> None:
    """Compare every function with plain Python.

    Raises:
        CodecError: names the function, the arguments and both answers.
    """
    for name, want in expected(codec).items():
        have = run(name, want.arguments)
        if name == "encode":
            mask = np.uint32((1 << 8 * codec.itemsize) - 1)
            same = have & mask == want.results
        else:
            both_nan = np.isnan(have.view(np.float32)) & np.isnan(want.results.view(np.float32))
            same = (have == want.results) | both_nan
        if same.all():
            continue
        first = int(np.flatnonzero(~same)[0])
        raise CodecError(_difference(codec, name, want, have, first, where))


def _difference(
    codec: Codec, name: str, want: Expected, have: Array, first: int, where: str
) -> str:
    def text(what: str, word: np.uint32) -> str:
        if what in ("bits", "encode"):
            return hex(int(word))
        return str(word.view(np.float32))

    names = codec.arguments()[name]
    given = zip(names, want.arguments, strict=True)
    shown = ", ".join(f"{n}={text(n, column[first])}" for n, column in given)
    return (
        f"codec {codec.name}: {name}({shown}) is {text(name, want.results[first])} in Python and "
        f"{text(name, have[first])} when compiled for {where}: must be the same. Float constants "
        "are float32; write np.float32(n) around integers that meet floats, and look for NaN "
        "before min and max"
    )


def _calls(codec: Codec, name: str) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(2026)
    plain = plain_of(codec)
    amaxes = [np.float32(a) for a in (*AMAXES, *10.0 ** rng.uniform(-6, 6, MORE))]
    if name in ("scale", "inverse"):
        yield from ((amax,) for amax in amaxes)
    elif name == "encode":
        for amax in amaxes if codec.scaled else [np.float32(1), np.float32(HUGE)]:
            factor = plain.factor(amax)
            for share in (*SHARES, *rng.uniform(-1, 1, MORE)):
                with np.errstate(all="ignore"):
                    yield amax * np.float32(share), factor
            yield from ((np.float32(v), factor) for v in (np.nan, np.inf, -np.inf, 1.0))
    else:
        scales = [plain.scale(amax) for amax in amaxes] if codec.scaled else [np.float32(1)]
        whole = np.arange(256) if codec.itemsize == 1 else np.arange(0, 65536, 251)
        for number, scale in enumerate(scales):
            for bits in whole if number < 4 else rng.choice(whole, MORE):
                yield int(bits), scale


def _words(column: Any) -> Array:
    """Floats by their bits, integers as they are, as uint32."""
    array = np.asarray(column)
    return array.view(np.uint32) if array.dtype == np.float32 else array.astype(np.uint32)
