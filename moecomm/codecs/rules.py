"""What a function of a codec may be, as far as Python's bytecode shows it; and its fingerprint.

numba refuses much more, but says so in terms of its own, and only when it compiles.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np

from moecomm.errors import CodecError

Function = Callable[..., Any]

# What ends in an error that nobody could see in the middle of a kernel, or is no arithmetic.
FORBIDDEN: Final = {
    "RAISE_VARARGS": "raise and assert are not possible in a kernel",
    "IMPORT_NAME": "import belongs outside of the function",
    "STORE_GLOBAL": "must not change anything outside of itself",
    "MAKE_FUNCTION": "must not define functions or classes",
    "LOAD_BUILD_CLASS": "must not define functions or classes",
    "YIELD_VALUE": "must not be a generator",
}
BUILTINS: Final = ("abs", "bool", "float", "int", "len", "max", "min", "range", "round")
MODULES: Final = (math, np)
TABLE_DTYPES: Final = "biuf"


def check(where: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raise ``CodecError`` unless ``function`` is plain and takes ``arguments``."""
    if not isinstance(function, FunctionType):
        raise CodecError(f"{where}: is {function!r}: must be a Python function")
    _check_arguments(where, function, arguments)
    for instruction in dis.get_instructions(function):
        if instruction.opname in FORBIDDEN:
            raise CodecError(f"{where}: {FORBIDDEN[instruction.opname]}")
    if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        raise CodecError(f"{where}: must not be a generator or coroutine")
    for name, value in outside(function).items():
        _check_value(f"{where}: {name}", name, value)


def outside(function: Function) -> dict[str, Any]:
    """Name → value of what a function uses from its module, Python, or a function around it."""
    names = [
        i.argval for i in dis.get_instructions(function) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        if name in function.__globals__:
            found[name] = function.__globals__[name]
        elif hasattr(builtins, name):
            found[name] = getattr(builtins, name)
        else:
            found[name] = _Missing()
    return found | _captured(function)


def weakened(function: Function) -> Function:
    """The function with all that it uses as it is now, and all its float constants as float32.

    So numpy and numba mean the same: to numpy 2 a Python float takes the type of the other operand,
    to numba it is a float64.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__
    values = outside(function)
    cells = tuple(CellType(_weak(values[name])) for name in code.co_freevars)
    known = {name: _weak(value) for name, value in values.items() if name not in code.co_freevars}
    return FunctionType(
        code.replace(co_consts=tuple(map(_weak, code.co_consts))),
        {**known, "__name__": function.__module__, "__builtins__": builtins},
        function.__name__,
        None,
        cells,
    )


def fingerprints(functions: Mapping[str, Function]) -> Iterator[str]:
    """Texts that are equal for functions that do the same in the same way."""
    yield f"Python {sys.version_info[0]}.{sys.version_info[1]}"  # bytecode is this version's own
    for which, function in functions.items():
        assert isinstance(function, FunctionType)
        code = function.__code__
        # A docstring stands where None would; no other text is of use to a codec.
        consts = [_text(None if isinstance(value, str) else value) for value in code.co_consts]
        values = [f"{name}={_text(value)}" for name, value in sorted(outside(function).items())]
        yield "\n".join((which, code.co_code.hex(), *consts, *code.co_names, *values))


def digest(texts: Iterable[str]) -> str:
    """One hash of all."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


class _Missing:
    def __repr__(self) -> str:
        return "not defined"


def _check_arguments(where: str, function: FunctionType, arguments: tuple[str, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    plain = all(
        p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.default is inspect.Parameter.empty
        for p in parameters
    )
    if plain and len(parameters) == len(arguments):
        return
    text = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    rule = f"must take {len(arguments)}: ({', '.join(arguments)}), without defaults"
    raise CodecError(f"{where}: takes ({text}): {rule}")


def _captured(function: Function) -> dict[str, Any]:
    assert isinstance(function, FunctionType)
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # assigned later
            found[name] = _Missing()
    return found


def _check_value(where: str, name: str, value: Any) -> None:
    if _is_number(value) or value in MODULES_AND_TYPES:
        return
    if isinstance(value, tuple) and value and all(map(_is_number, value)):
        return
    if isinstance(value, np.ndarray):
        if value.dtype.kind in TABLE_DTYPES and value.dtype != np.float64:
            return
        raise CodecError(f"{where}: a table of {value.dtype}: must be float32 or integers")
    builtin = name in BUILTINS and value is getattr(builtins, name)
    if builtin or (isinstance(value, BuiltinFunctionType) and value.__module__ == "math"):
        return
    raise CodecError(
        f"{where}: is {value!r}: a codec may use numbers, tables of numbers, math, numpy's number "
        f"types and {', '.join(BUILTINS)}"
    )


class _ModulesAndTypes:
    """math, numpy, and numpy's number types."""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, ModuleType):
            return value in MODULES
        return isinstance(value, type) and issubclass(value, np.number | np.bool_)


MODULES_AND_TYPES: Final = _ModulesAndTypes()


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_)


def _weak(value: Any) -> Any:
    if type(value) is float:
        return np.float32(value)
    if type(value) is tuple:
        return tuple(map(_weak, value))
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.setflags(write=False)
    return value


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"table {value.dtype}{value.shape} {value.tobytes().hex()}"
    if isinstance(value, CodeType):
        return value.co_code.hex()
    if isinstance(value, ModuleType | type | BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{type(value).__name__} {value!r}"
