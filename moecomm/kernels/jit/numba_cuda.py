"""``numba.cuda``, imported so that it works, and used to compile without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Final

import numpy as np

from moecomm.errors import CompileError
from moecomm.kernels.jit.toolchain import INSTALL, Toolchain

_LOCK: Final = threading.RLock()  # numba compiles one function at a time; `_device` is global


def load() -> Any:
    """The module ``numba.cuda`` of the package numba-cuda.

    Raises:
        CompileError: numba-cuda, or a library that it needs, is missing or does not fit.
    """
    toolchain = Toolchain.load()  # the library versions, compared
    try:
        metadata.version("numba-cuda")  # numba's own numba.cuda cannot do what we need
        if not hasattr(np, "row_stack"):  # gone in numpy 2.5; numba-cuda 0.30 takes it at import
            np.row_stack = np.vstack  # type: ignore[attr-defined, unused-ignore]
        with warnings.catch_warnings():  # what numpy 2.5 says to it, its users cannot change
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module("numba.cuda")
    except ImportError as error:  # PackageNotFoundError is one, too
        raise CompileError(
            f"Python functions cannot be compiled for a GPU here: {error}. Run {INSTALL}"
        ) from error
    if toolchain.nvvm is None:  # no wheel; a CUDA toolkit has one, too
        _check_nvvm()
    return module


def _check_nvvm() -> None:
    """Raise ``CompileError`` where numba-cuda finds no NVVM."""
    nvvm = importlib.import_module("numba.cuda.cudadrv.nvvm")
    try:
        nvvm.NVVM()
    except Exception as error:  # noqa: BLE001, it has many
        raise CompileError(
            "Python functions cannot be compiled for a GPU here: neither the Python package "
            f"nvidia-nvvm nor a CUDA toolkit's NVVM is there ({error}). Run {INSTALL}"
        ) from error


def identity() -> str:
    """Text for cache keys: changes with whatever can change what numba makes; imports nothing."""
    names = ("numba-cuda", "numba", "llvmlite", "numpy", "nvidia-nvvm")
    return " ".join(f"{name} {_version(name)}" for name in names)


def device_function(
    function: Callable[..., Any],
    signature: Callable[[Any], Any],
    name: str,
    arch: str,
    *,
    inline: bool = False,
    convergent: bool = False,
) -> bytes:
    """Compile ``function`` to LTO-IR, as the ``extern "C" __device__`` function ``name``.

    Args:
        signature: ``numba.types`` → signature, return type included.
        arch: such as "sm_90": code for this architecture and later ones.
        inline: into whatever calls it, however long it is.
        convergent: what it calls may be a barrier, or ask other threads: the compiler must not call
            it in other places than the function does. numba says nothing of the kind by itself.

    Raises:
        CompileError: numba refuses the function, or is missing.
    """
    cuda = load()
    types = importlib.import_module("numba.types")
    options = {"output": "ltoir", "abi": "c", "abi_info": {"abi_name": name}, "device": True}
    options["forceinline"] = inline
    marked = _calls_stay_together() if convergent else contextlib.nullcontext()
    with _LOCK, _device(capability(arch)), marked:
        try:
            code, _ = cuda.compile(function, signature(types), cc=capability(arch), **options)
        except Exception as error:
            raise CompileError(
                f"{name} does not compile for {arch}: {error}", str(error)
            ) from error
    return bytes(code)


def capability(arch: str) -> tuple[int, int]:
    """ "sm_90a" → (9, 0)."""
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("af")), 10)
    return major, minor


@contextlib.contextmanager
def _device(cc: tuple[int, int]) -> Iterator[None]:
    """Let numba find a GPU of capability ``cc``: its overloads ask for one, and only for that."""
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _Device(cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


@contextlib.contextmanager
def _calls_stay_together() -> Iterator[None]:
    """Give numba's functions, and those that they call, the attribute that CUDA C++'s have."""
    library: Any = importlib.import_module("numba.cuda.codegen").CUDACodeLibrary
    real = library.get_ltoir

    def get_ltoir(self: Any, cc: Any = None) -> Any:
        for module in self.modules:
            for function in module.functions:
                if not function.name.startswith("llvm."):  # LLVM knows its own
                    function.attributes.add("convergent")
        return real(self, cc)

    library.get_ltoir = get_ltoir
    try:
        yield
    finally:
        library.get_ltoir = real


class _Device:
    id = 0

    def __init__(self, cc: tuple[int, int]) -> None:
        self.compute_capability = cc


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
