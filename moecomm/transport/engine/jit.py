"""Compiling the hot loop and what it calls: once per machine, kept in moecomm's cache folder.

numba recompiles a function when its own file has changed, but not when a file has that it takes
functions from. So the folder carries a digest of all sources of ``moecomm.transport``, and of those
whose numbers they use: any change starts an empty one.

``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` (numba's variables) are part of numba's keys. Where
several kinds of machine share a cache folder, ``NUMBA_CPU_NAME=x86-64 NUMBA_CPU_FEATURES=`` makes
one entry serve them all; nothing here needs wide vectors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import compiler, config

from moecomm.cache import default_cache, key_of
from moecomm.filelock import exclusive

# A division cannot raise, so that no path leads back into Python.
_OPTIONS: Final = {"nogil": True, "error_model": "numpy"}

_HOOK_OPTIONS: Final = {"error_model": "numpy", "forceinline": True}

_COMPILE_TIMEOUT_S: Final = 300.0  # of the process that has the turn

# Called from compiled functions alone, and compiled with them. numba hands ``forceinline`` on: what
# a hook or a flat function calls is put in the place of every call, too.
inner: Final = numba.njit(**_OPTIONS)
# The same, put in the place of every call: for what each command or event goes through. LLVM leaves
# half of that as calls, which take a third of the time from command to post.
flat: Final = numba.njit(forceinline=True, **_OPTIONS)
# The same, but a call where it is long: for what is rare, so that the rest lies together. An idle
# turn then goes over to another page of code 4 times instead of 7.
cold: Final = numba.njit(forceinline=False, **_OPTIONS)


def hot(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that Python calls, such as the loop, without the GIL."""

    def compile_it(function: Callable[..., Any]) -> Any:
        with _cache_folder():
            return numba.njit(signature, cache=True, **_OPTIONS)(function)

    return compile_it


class _HookCompiler(compiler.Compiler):  # type: ignore[misc]
    """Puts a hook's body into C's entry to it. numba's own entry calls the body and looks whether
    it has raised something, which hooks cannot: 18 instructions for each of the two hooks that an
    idle turn of the loop calls, which has 140 without."""

    def __init__(self, typing: Any, target: Any, *rest: Any) -> None:
        own = target.subtarget(create_cfunc_wrapper=functools.partial(_enter, target))
        super().__init__(typing, own, *rest)


def _enter(target: Any, library: Any, function: Any, *_: Any) -> None:
    """Add the C function that is the hook to ``library``."""
    module, convention = target.create_module("entry"), target.call_conv
    result, arguments = function.restype, function.argtypes
    body_type = convention.get_function_type(result, arguments)
    body = ir.Function(module, body_type, function.llvm_func_name)
    values = [target.get_value_type(kind) for kind in (result, *arguments)]
    entry_type = ir.FunctionType(values[0], values[1:])
    entry = ir.Function(module, entry_type, function.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(entry.append_basic_block())
    _, returned = convention.call_function(builder, body, result, arguments, entry.args)
    builder.ret(returned)
    library.add_ir_module(module)


def hook(signature: str) -> Callable[[Callable[..., Any]], int]:
    """Compile a function to be called by address from machine code; the address."""

    def compile_it(function: Callable[..., Any]) -> int:
        with _cache_folder():
            compiled = numba.cfunc(
                signature, cache=True, pipeline_class=_HookCompiler, **_HOOK_OPTIONS
            )(function)
        _alive.append(compiled)
        return int(compiled.address)

    return compile_it


_alive: Final[list[Any]] = []  # machine code goes with its object; hooks are called by address


def load(*modules: str) -> None:
    """Import modules with hot functions. Processes that find nothing compiled take turns, so that
    one compiles and the others load: a loop takes some seconds."""
    if all(module in sys.modules for module in modules):
        for module in modules:
            importlib.import_module(module)  # waits for a thread that is still at it
        return
    folder = default_cache().folder(_digest())
    with exclusive(folder / ".lock", _COMPILE_TIMEOUT_S):
        for module in modules:
            importlib.import_module(module)


@contextlib.contextmanager
def _cache_folder() -> Iterator[None]:
    """numba takes the folder from its configuration at the moment of decoration."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(default_cache().folder(_digest()))
    try:
        yield
    finally:
        config.CACHE_DIR = before


@functools.cache
def _digest() -> str:
    package = Path(__file__).parents[2]
    sources = [*sorted((package / "transport").rglob("*.py")), *sorted(package.glob("remote*.py"))]
    parts: list[bytes | str] = [numba.__version__]
    for source in sources:
        parts += [source.name, source.read_bytes()]
    return f"numba-{key_of(*parts)[:32]}"
