"""A codec's functions as machine code of this CPU: what the emulator calls, and the type check."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.codecs.definition import Codec, Function
from moecomm.codecs.proof import prove
from moecomm.errors import CodecError, CompileError

INSTALL: Final = 'pip install "numba>=0.61"'
# Division by zero is infinity, as in a kernel, and never an exception.
OPTIONS: Final = {"error_model": "numpy"}
_LOCK: Final = threading.Lock()  # ranks that are threads ask at once


class MachineCode:
    """``addresses``: function → where its code is, with C's calling convention."""

    def __init__(self, addresses: dict[str, int], owners: list[Any]) -> None:
        self.addresses = addresses
        self._owners = owners  # the code goes with them


def machine_code(codec: Codec) -> MachineCode:
    """Compile ``codec`` for this CPU and compare it with plain Python; once a process.

    Raises:
        CodecError: a function cannot be compiled, returns the wrong type, or differs.
        CompileError: numba is not installed.
    """
    with _LOCK:
        return _machine_code(codec)


@functools.lru_cache(maxsize=64)
def _machine_code(codec: Codec) -> MachineCode:
    numba = load_numba(codec)
    addresses, owners = {}, []
    for name, function in codec.frozen.items():
        signature = check_types(numba, codec, name, function)
        compiled = numba.cfunc(signature, **OPTIONS)(function)
        addresses[name] = int(compiled.address)
        owners.append(compiled)
    prove(codec, functools.partial(_run, codec, addresses), "this CPU")
    return MachineCode(addresses, owners)


def load_numba(codec: Codec) -> Any:
    """The package numba.

    Raises:
        CompileError: it is not installed.
    """
    try:
        return importlib.import_module("numba")
    except ImportError as error:
        raise CompileError(
            f"codec {codec.name}: codecs are compiled by numba, which cannot be imported "
            f"({error}). Run {INSTALL}"
        ) from error


def check_types(numba: Any, codec: Codec, name: str, function: Function) -> Any:
    """Return the signature to compile a function with, if it returns what it must.

    Raises:
        CodecError: numba does not accept the function, or it returns another type.
    """
    where = f"codec {codec.name}: {name}"
    arguments = argument_types(numba.types, codec, name)
    try:
        dispatcher = numba.njit(function, **OPTIONS)
        dispatcher.compile(arguments)
    except numba.core.errors.NumbaError as error:
        raise CodecError(f"{where}: numba does not compile it: {_first_lines(error)}") from error
    types = numba.types
    returned = types.unliteral(dispatcher.nopython_signatures[0].return_type)
    allowed = types.Integer if name == "encode" else types.Integer | types.Float
    if not isinstance(returned, allowed):
        rule = "an integer, the element's bits" if name == "encode" else "a number"
        raise CodecError(f"{where}: returns {returned}: must be {rule}")
    return return_type(types, name)(*arguments)


def argument_types(types: Any, codec: Codec, name: str) -> tuple[Any, ...]:
    """numba's types of what a function gets."""
    bits = types.int32 if codec.signed else types.uint32
    return tuple(bits if n == "bits" else types.float32 for n in codec.arguments()[name])


def return_type(types: Any, name: str) -> Any:
    """numba's type of what a kernel gets back."""
    return types.uint32 if name == "encode" else types.float32


def _run(
    codec: Codec, addresses: dict[str, int], name: str, arguments: list[NDArray[Any]]
) -> NDArray[Any]:
    """Call the function in a loop; see ``proof.Run``."""
    names = codec.arguments()[name]
    kinds = [ctypes.c_uint32 if n == "bits" else ctypes.c_float for n in names]
    result = ctypes.c_uint32 if name == "encode" else ctypes.c_float
    function = ctypes.CFUNCTYPE(result, *kinds)(addresses[name])
    columns = [
        signed(codec, column).tolist() if n == "bits" else column.view(np.float32).tolist()
        for n, column in zip(names, arguments, strict=True)
    ]
    answers = [function(*call) for call in zip(*columns, strict=True)]
    dtype = np.uint32 if name == "encode" else np.float32
    return np.array(answers, dtype).view(np.uint32)


def signed(codec: Codec, bits: NDArray[Any]) -> NDArray[Any]:
    """Bits as they travel → uint32 as ``decode`` gets them."""
    if not codec.signed:
        return bits
    half = 1 << (8 * codec.itemsize - 1)
    return ((bits.astype(np.int64) + half) % (2 * half) - half).astype(np.int32).view(np.uint32)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Failed in", "During:"))]
    return " ".join(kept[:3])
