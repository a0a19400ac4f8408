"""What a codec may be, what it means in plain Python, and what is said when it is wrong."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import codec_examples
import numpy as np
import pytest
from codec_examples import ALL, Int8PerToken, OffsetBinary, Truncated
from payload import assert_same_bits

import moecomm as mc
from moecomm.codecs import proof, rules
from moecomm.dtypes import numpy_dtype
from moecomm.kernels import coding
from moecomm.kernels.jit import numba_cuda

BASE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens": 8}
FACTOR = 3.0
NOT_A_NUMBER = object()


def decode(bits: Any, scale: Any) -> Any:
    return np.float32(bits) * scale


def scale_of(amax: Any) -> Any:
    return amax + 1.0


def make(encode: Any, **given: Any) -> mc.Codec:
    """A codec for which only ``encode`` matters."""
    functions = {"decode": decode, "scale": scale_of, **given}
    return mc.Codec("Mine", "int8", None, encode, **functions)


# ---- what it means ---------------------------------------------------------------------------


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("block", [16, 128])
def test_fp8_as_a_codec_gives_the_casts_bits(block: int, pow2: bool) -> None:
    """Every bfloat16 there is, then wild float32."""
    every = np.arange(65536, dtype=np.uint16).view(numpy_dtype("bfloat16"))
    rng = np.random.default_rng(7)
    every = rng.permutation(every).reshape(128, 512)
    wild = rng.standard_normal((9, 300)) * 10.0 ** rng.uniform(-30, 30, (9, 300))
    wild[3], wild[4, 5], wild[5, 7] = 0, np.nan, -np.inf
    for x in (every, wild.astype(np.float32)):
        have, have_scale = mc.reference.encode(mc.codecs.fp8(block, pow2), x)
        want, want_scale = mc.reference.quantize(x, block, pow2)
        assert_same_bits(have, want, "rows")
        assert_same_bits(have_scale, want_scale, "scales")


def test_fp8_as_a_codec_decodes_to_what_dequantize_gives() -> None:
    q = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn")).reshape(1, 256)
    scale = np.array([[0.5, 3e-39, 1e30, 0.1]], np.float32)
    have = mc.reference.decode(mc.codecs.fp8(64), q, scale)
    want = mc.reference.dequantize(q, scale, 64)
    numbers = ~np.isnan(want)
    assert_same_bits(have[numbers], want[numbers], "values")
    assert (have.view(np.uint32)[~numbers] == 0x7FC00000).all()


def test_int8_rounds_half_to_even_and_keeps_the_largest() -> None:
    x = np.array([[127.0, 0.5, 1.5, 2.5, -2.5, -127.0, np.nan], [0.0] * 7], np.float32)
    q, scale = mc.reference.encode(Int8PerToken, x)
    assert q.dtype == np.int8
    assert q.tolist() == [[127, 0, 2, 2, -2, -127, 127], [0] * 7]
    assert scale.tolist() == [[1.0], [0.0]]


def test_amax_is_of_the_block_and_ignores_nan() -> None:
    x = np.full((1, 70), 0.25, numpy_dtype("bfloat16"))
    x[0, 3], x[0, 40], x[0, 41] = -8, np.nan, 2
    _, scale = mc.reference.encode(OffsetBinary, x)
    assert scale.shape == (1, 3)
    assert np.array_equal(scale[0] * np.float32(127), np.float32([8, 2, 0.25]))


def test_without_scale_nothing_but_the_row_travels() -> None:
    x = np.array([[1.0, -2.5]], np.float32)
    q, scale = mc.reference.encode(Truncated, x)
    assert scale is None
    assert q.dtype == numpy_dtype("bfloat16")
    assert mc.reference.decode(Truncated, q, None).tolist() == [[1.0, -2.5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decoded_rows_are_rounded_once_with_one_nan(dtype: str) -> None:
    q = np.array([[0x3F81, 0x7F7F, 0xFFC1]], np.uint16).view(numpy_dtype("bfloat16"))
    have = mc.reference.decode(Truncated, q, None, dtype)
    nan = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7FFF}[dtype]
    assert have.dtype == numpy_dtype(dtype)
    assert float(have[0, 0]) == 1.0078125
    assert math.isinf(float(have[0, 1])) == (dtype == "float16")
    assert int(have.view(f"u{have.itemsize}")[0, 2]) == nan


@pytest.mark.parametrize("name", ALL)
def test_compiled_for_this_cpu_it_is_the_same(name: str) -> None:
    ALL[name].check()


# ---- what a codec is -------------------------------------------------------------------------


def test_the_decorator_takes_static_methods_and_plain_functions() -> None:
    assert isinstance(Int8PerToken, mc.Codec)
    assert isinstance(OffsetBinary, mc.Codec)
    assert Int8PerToken.encode(2.5, 1.0) == 2
    assert str(Int8PerToken).startswith("Int8PerToken: int8, a scale per token, ")
    assert Int8PerToken.num_scales(100) == 1
    assert OffsetBinary.num_scales(100) == 4
    assert Truncated.num_scales(100) == 0


def test_it_is_found_by_its_name() -> None:
    by_name = mc.MoeConfig(**BASE, codec="Int8PerToken")
    assert by_name.codec is Int8PerToken
    assert by_name == mc.MoeConfig(**BASE, codec=Int8PerToken)
    assert by_name.wire_dtype == by_name.recv_dtype == "int8"
    assert mc.MoeConfig(**BASE, codec="copy").codec is None


@pytest.mark.parametrize("name", ALL)
def test_it_travels_to_other_processes(name: str) -> None:
    codec = ALL[name]
    again = pickle.loads(pickle.dumps(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    assert copy.deepcopy(codec) == codec


def _times(value: Any, scale: Any) -> Any:
    return round(value * FACTOR)


def test_it_is_what_it_computes() -> None:
    def encode(value: Any, scale: Any) -> Any:
        return round(value * 3.0)

    def same(value: Any, scale: Any) -> Any:
        """Says more."""
        return round(value * 3.0)

    def other(value: Any, scale: Any) -> Any:
        return round(value * 3.5)

    first = make(encode)
    assert make(same) == first
    assert make(other) != first
    assert mc.Codec("Yours", "uint8", None, encode, decode, scale_of) != first
    assert mc.Codec("Mine", "int8", 32, encode, decode, scale_of) != first


def test_a_constant_of_its_module_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make(_times)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 4.0)
    assert make(_times) != before
    # What is made stays as it was.
    assert before.frozen["encode"](np.float32(5), np.float32(1)) == 15


def test_a_table_is_copied() -> None:
    table = np.array([5, 6], np.int32)

    def encode(value: Any, scale: Any) -> Any:
        return table[0]

    made = make(encode)
    table[0] = 7
    assert made.frozen["encode"](np.float32(1), np.float32(1)) == 5
    assert make(encode) != made


def test_python_floats_are_float32_for_it_wherever_they_stand() -> None:
    outer = 0.1

    def encode(value: Any, scale: Any) -> Any:
        return value * 0.2 + outer + FACTOR

    weak = rules.weakened(encode)
    found = weak(np.float32(1), np.float32(1))
    assert type(found) is np.float32
    assert type(weak.__globals__["FACTOR"]) is np.float32
    assert type(weak.__closure__[0].cell_contents) is np.float32


# ---- what is wrong with it -------------------------------------------------------------------


def _no_answer(value: Any, scale: Any) -> Any:
    raise ValueError


def _importing(value: Any, scale: Any) -> Any:
    import math

    return math.floor(value)


def _defining(value: Any, scale: Any) -> Any:
    return (lambda: 1)()


def _yielding(value: Any, scale: Any) -> Any:
    yield 1


def _printing(value: Any, scale: Any) -> Any:
    return print(value)  # noqa: T201


def _using_an_object(value: Any, scale: Any) -> Any:
    return NOT_A_NUMBER


def _unknown(value: Any, scale: Any) -> Any:
    return nowhere(value)  # noqa: F821


def _one(value: Any) -> Any:
    return 1


def _default(value: Any, scale: Any = 1.0) -> Any:
    return 1


def _star(*values: Any) -> Any:
    return 1


SEEN = {
    "raise": (_no_answer, "encode: raise and assert are not possible in a kernel"),
    "import": (_importing, "encode: import belongs outside of the function"),
    "lambda": (_defining, "encode: must not define functions or classes"),
    "yield": (_yielding, "encode: must not be a generator"),
    "print": (_printing, "encode: print: is <built-in function print>: a codec may use numbers"),
    "object": (_using_an_object, "encode: NOT_A_NUMBER: is <object object"),
    "unknown": (_unknown, "encode: nowhere: is not defined: a codec may use"),
    "one": (_one, r"encode: takes \(value\): must take 2: \(value, scale\), without defaults"),
    "default": (_default, "encode: takes .* must take 2"),
    "star": (_star, "encode: takes .* must take 2"),
    "class": (int, "encode: is <class 'int'>: must be a Python function"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_can_be_seen_without_compiling(name: str) -> None:
    function, message = SEEN[name]
    with pytest.raises(mc.CodecError, match=f"^codec Mine: {message}"):
        make(function)


def _text(value: Any, scale: Any) -> Any:
    return "one"


def _nothing(value: Any, scale: Any) -> None:
    value = value + scale


def _a_float(value: Any, scale: Any) -> Any:
    return value * scale


def _a_bool(value: Any, scale: Any) -> Any:
    return value > scale


def _an_attribute(value: Any, scale: Any) -> Any:
    return value.nearest


COMPILED = {
    "text": (_text, r"encode: returns unicode_type: must be an integer, the element's bits"),
    "nothing": (_nothing, "encode: returns none: must be an integer"),
    "float": (_a_float, "encode: returns float32: must be an integer, the element's bits"),
    "bool": (_a_bool, "encode: returns bool: must be an integer"),
    "attribute": (_an_attribute, "encode: numba does not compile it: Unknown attribute 'nearest'"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_numba_finds(name: str) -> None:
    function, message = COMPILED[name]
    with pytest.raises(mc.CodecError, match=f"^codec Mine: {message}"):
        make(function).check()


def test_a_scale_must_be_a_number() -> None:
    def scale(amax: Any) -> Any:
        return None

    with pytest.raises(mc.CodecError, match="scale: returns none: must be a number"):
        make(_times, scale=scale).check()


def _rounding_nan(value: Any, scale: Any) -> Any:
    return round(value / scale)


def _without_end(value: Any, scale: Any) -> Any:
    return (int(min(1.0, abs(value))) << 70) >> 68


DIFFERENT = {
    "nan": (
        _rounding_nan,
        r"encode\(value=nan, scale=1.0\) raises ValueError: cannot convert float NaN to integer; "
        "it must have an answer for every number",
    ),
    "shift": (_without_end, "encode.* is 0x4 in Python and 0x0 when compiled for this CPU: must"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_python_and_machine_code_disagree_about(name: str) -> None:
    function, message = DIFFERENT[name]
    with pytest.raises(mc.CodecError, match=f"^codec Mine: {message}"):
        make(function).check()


def test_a_function_that_is_compiled_wrong_is_noticed() -> None:
    """Every answer counts: one wrong bit of one of them is enough."""
    want = proof.expected(Int8PerToken)

    def run(name: str, arguments: list[Any]) -> Any:
        answers = want[name].results.copy()
        answers[-1] ^= np.uint32(name == wrong)
        return answers

    for wrong in ("scale", "inverse", "encode", "decode"):
        with pytest.raises(mc.CodecError, match=rf"{wrong}\(.*when compiled for sm_90: must be"):
            proof.prove(Int8PerToken, run, "sm_90")
    wrong = ""
    proof.prove(Int8PerToken, run, "sm_90")


def test_the_class_must_hold_functions_of_a_codec_only() -> None:
    with pytest.raises(mc.CodecError, match=r"codec Extra: has 'LIMIT': must have scale, inverse"):

        @mc.codec(wire_dtype="int8")
        class Extra:
            LIMIT = 3

            def encode(value: Any) -> Any:
                return 1

            def decode(bits: Any) -> Any:
                return 1.0

    with pytest.raises(mc.CodecError, match="codec Half: has no decode: must have encode and"):

        @mc.codec(wire_dtype="int8")
        class Half:
            def encode(value: Any) -> Any:
                return 1

    with pytest.raises(mc.CodecError, match="decorates a class, not <function"):
        mc.codec(wire_dtype="int8")(decode)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wire_dtype": "int4"}, "wire_dtype='int4': must be one of 'int8', 'uint8'"),
        ({"wire_dtype": "float32"}, "wire_dtype='float32': must be one of"),
        ({"block": 48}, r"block=48: must be None \(a scale per token\) or one of 16, 32, .* 512 "),
        ({"block": 512, "wire_dtype": "int16"}, "block=512: .* 128, 256 for int16"),
        ({"block": True}, "block=True: must be"),
        ({"block": 16, "scale": None}, "block=16: has no scale function, so no scales"),
        ({"scale": None, "inverse": scale_of}, "has inverse and no scale"),
    ],
)
def test_numbers_of_a_codec(given: dict[str, Any], message: str) -> None:
    plain = {"name": "Mine", "wire_dtype": "int8", "block": None, "scale": scale_of}
    with pytest.raises(mc.CodecError, match=f"^codec Mine: {message}"):
        mc.Codec(**{**plain, "encode": _times, "decode": decode, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"codec": 3}, "codec=3: must be a codec, or the name of one"),
        ({"codec": "Nobody"}, r"codec='Nobody': must be .* 'copy', 'Int8PerToken'"),
        ({"decode_to": "bfloat16"}, "decode_to='bfloat16': needs a codec that decodes"),
        ({"codec": Int8PerToken, "decode_to": "int8"}, "decode_to='int8': must be one of None, "),
        (
            {"codec": Int8PerToken, "dispatch_dtype": "float16"},
            "dispatch_dtype='float16' with codec='Int8PerToken': the codec says what travels",
        ),
        ({"codec": Int8PerToken, "scale_block": 32}, "scale_block=32 with codec='Int8PerToken'"),
    ],
)
def test_configurations_that_contradict_themselves(given: dict[str, Any], message: str) -> None:
    with pytest.raises(mc.ConfigError, match=f"^{message}"):
        mc.MoeConfig(**{**BASE, **given})


# ---- what is missing -------------------------------------------------------------------------


def test_without_numba_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(mc.CompileError, match=r"codec Mine: .* numba, which cannot .*Run pip inst"):
        make(_times).check()


def test_without_numba_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, cold_cache: Any) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "numba-cuda":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(numba_cuda.metadata, "version", version)
    with pytest.raises(mc.CompileError, match=r"for a GPU here: .*numba-cuda.*moecomm\[cuda13\]"):
        coding.link_functions(Int8PerToken, ("encode",), "sm_90")


def test_numba_is_not_loaded_before_a_codec_is_used() -> None:
    code = "import sys, codec_examples; assert 'numba' not in sys.modules"
    folder = Path(codec_examples.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)
