"""A codec's functions on a GPU, called one by one and compared with plain Python."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecomm.codecs.definition import FUNCTIONS, Codec
from moecomm.codecs.proof import prove
from moecomm.cuda_driver import call, copy_from_device, copy_to_device, current
from moecomm.kernels import coding
from moecomm.kernels.jit import Compiled, compile_kernel

BLOCKS: Final = 16
THREADS: Final = 128
_LOCK: Final = threading.Lock()  # ranks that are threads ask at once


class CheckArgs(ctypes.Structure):
    """Mirrors ``codec_check.cu``."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("first", "second", "results", "count", "function")
    ]


def check_on_gpu(codec: Codec, index: int, arch: str) -> None:
    """Compare ``codec``, compiled for ``arch``, with plain Python on device ``index``; once a
    process.

    Raises:
        CodecError: a function cannot be compiled, or differs.
        CompileError: numba or numba-cuda is missing.
    """
    with _LOCK:
        _check_on_gpu(codec, index, arch)


@functools.lru_cache(maxsize=64)
def _check_on_gpu(codec: Codec, index: int, arch: str) -> None:
    compiled = compile_check(codec, arch)
    with current(index) as cu:
        module = call(cu.cuModuleLoad, str(compiled.path).encode())
        try:
            function = call(cu.cuModuleGetFunction, module, b"codec_check")
            prove(codec, functools.partial(_run, cu, index, function), arch)
        finally:
            call(cu.cuModuleUnload, module)


def compile_check(codec: Codec, arch: str) -> Compiled:
    """The cubin of the kernel that calls ``codec``'s functions."""
    link = coding.link_functions(codec, tuple(codec.functions()), arch)
    return compile_kernel("codec_check.cu", coding.check_defines(codec), arch, link=link)


def _run(
    cu: Any, index: int, function: Any, name: str, arguments: list[NDArray[Any]]
) -> NDArray[Any]:
    """See ``proof.Run``."""
    count = len(arguments[0])
    nbytes = 4 * count
    memory = int(call(cu.cuMemAlloc, 3 * nbytes))
    try:
        for place, column in enumerate(arguments):
            copy_to_device(index, memory + place * nbytes, np.ascontiguousarray(column).tobytes())
        places = (memory, memory + nbytes, memory + 2 * nbytes)
        args = CheckArgs(*places, count, FUNCTIONS.index(name))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        grid, block = (BLOCKS, 1, 1), (THREADS, 1, 1)
        call(cu.cuLaunchKernel, function, *grid, *block, 0, 0, ctypes.addressof(pointers), 0)
        # In the same stream, and waited for.
        return np.frombuffer(copy_from_device(index, places[2], nbytes), np.uint32)
    finally:
        call(cu.cuMemFree, memory)
