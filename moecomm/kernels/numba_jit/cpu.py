"""Kernel functions → machine code of this CPU, as object files that the emulator links."""

from __future__ import annotations

import platform
import threading
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from moecomm.cache import default_cache, key_of
from moecomm.errors import CompileError
from moecomm.kernels.numba_jit.lowered import Lowered

FORMAT: Final = "1"  # of the object files
_LOCK: Final = threading.Lock()  # of `warnings`, whose filters are everybody's
# Line numbers for the emulator's reports, in code that is optimised all the same.
_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",  # a division by zero is the machine's, not an exception
    "debug": True,
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_dbg_optnone": False,
    "_dbg_extend_lifetimes": False,
}


def numba_symbol(lowered: Lowered) -> str:
    """What numba's function is called in its object file. It has numba's calling convention:
    ``int(i64* result, void** error, i64 ...)``; not 0: it raised."""
    return f"{lowered.symbol}_numba"


def object_file(lowered: Lowered) -> Path:
    """Return the object file of one function, compiled once for each text of it.

    Raises:
        CompileError: numba is missing, or refuses the function; the message says why and where.
    """
    key = key_of(
        f"numba object {FORMAT}",
        lowered.text,
        repr(sorted(_OPTIONS.items())),
        *(f"{name} {_version(name)}" for name in ("numba", "llvmlite")),
        f"{platform.system()} {platform.machine()} Python {platform.python_version()}",
    )

    def write(path: Path) -> None:
        path.write_bytes(compile_object(lowered))

    return default_cache().get(key, ".o", write, what=f"{lowered.name} in Python for the CPU")


def compile_object(lowered: Lowered) -> bytes:
    """As ``object_file``, without a cache."""
    numba = _numba()
    from numba.core.errors import NumbaError

    path = lowered.function.file
    try:
        # By a name without folder numba does not find the file, and does not parse it once more.
        result = _compile(numba, lowered, path.name)
    except NumbaError:
        try:
            result = _compile(numba, lowered, str(path))  # for a message that shows lines
        except NumbaError as error:
            raise CompileError(
                f"{path}: numba does not compile {lowered.name}:\n{error}", str(error)
            ) from error
    return _emit(result.library.get_llvm_str(), result.fndesc.llvm_func_name, lowered)


def _compile(numba: Any, lowered: Lowered, file: str) -> Any:
    int64 = numba.types.int64
    arguments = (int64,) * lowered.num_parameters
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", numba.NumbaDebugInfoWarning)
        compiled = numba.njit(int64(*arguments), **_OPTIONS)(lowered.bind(_external, file))
    return compiled.overloads[arguments]


def _emit(text: str, symbol: str, lowered: Lowered) -> bytes:
    """LLVM text → an object file with one name."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    for value in (*module.functions, *module.global_variables):
        if value.is_declaration:
            continue
        if value.name == symbol:
            value.name = numba_symbol(lowered)
        else:
            value.linkage = "internal"
    # Not this very CPU's instructions: the cache may be shared.
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(opt=2, reloc="pic", codemodel="default")
    return bytes(machine.emit_object(module))


def _external(symbol: str, num_parameters: int) -> Any:
    """A C function, for numba to call. What numba loads into this process calls address 1: nobody
    runs it; the emulator links the object file with the real functions."""
    import llvmlite.binding as llvm
    from numba.core import types, typing

    llvm.add_symbol(symbol, 1)
    signature = typing.signature(types.int64, *[types.int64] * num_parameters)
    return types.ExternalFunction(symbol, signature)


def _numba() -> Any:
    try:
        import numba
    except ImportError as error:
        raise CompileError(
            f"kernels='numba' needs the package numba ({error}). Run pip install numba"
        ) from error
    if numba.config.DISABLE_JIT:
        raise CompileError("kernels='numba' cannot be compiled while NUMBA_DISABLE_JIT is set")
    return numba


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
