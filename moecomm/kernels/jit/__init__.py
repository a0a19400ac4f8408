"""Run-time compilation of device code to cubins, for any architecture, on any machine.

CUDA C++ text → NVRTC (LTO-IR) → nvJitLink → cubin in the cache. Neither a GPU nor a driver nor
``nvcc`` is needed: the extra ``moecomm[cuda13]`` brings NVRTC and nvJitLink.
"""

from moecomm.kernels.jit.compiler import LinkInput
from moecomm.kernels.jit.kernel import Compiled, compile_kernel, compile_source
from moecomm.kernels.jit.resources import Resources
from moecomm.kernels.jit.sass import disassemble, disassembler
from moecomm.kernels.jit.toolchain import DEFAULT_ARCHS, Toolchain, check_versions

__all__ = [
    "DEFAULT_ARCHS",
    "Compiled",
    "LinkInput",
    "Resources",
    "Toolchain",
    "check_versions",
    "compile_kernel",
    "compile_source",
    "disassemble",
    "disassembler",
]
