"""Launching the stages on a GPU: cubins loaded once, arguments in a block of fixed place."""

from __future__ import annotations

import ctypes
from typing import Any

from moecomm.cuda_driver import attribute, call, driver, make_current
from moecomm.kernels.args import Args
from moecomm.kernels.geometry import Machine, geometry
from moecomm.kernels.jit import compile_kernel
from moecomm.kernels.stages import STAGES, gpu_defines, input_codes, source_name
from moecomm.layout import Layout

THREADS = 512  # a 7168-column row is one or two 16-byte chunks a thread
BLOCKS_PER_SM = 2


class GpuKernels:
    """The stages of one communicator on device ``index``; compiled and loaded at construction."""

    def __init__(self, layout: Layout, index: int) -> None:
        make_current(index)
        self._index = index
        self._layout = layout
        self._machine = Machine(BLOCKS_PER_SM * attribute(index, "MULTIPROCESSOR_COUNT"), THREADS)
        major = attribute(index, "COMPUTE_CAPABILITY_MAJOR")
        minor = attribute(index, "COMPUTE_CAPABILITY_MINOR")
        self._arch = f"sm_{major}{minor}"
        self._modules: list[Any] = []
        self._functions = {
            (stage, code): self._load(stage, code)
            for stage in STAGES
            for code in (input_codes(layout.cfg) if stage == "dispatch_send" else [0])
        }

    def launch(self, stage: str, args: Args, num_tokens: int, input_code: int, stream: int) -> None:
        """Queue one stage on ``stream`` (a CUDA stream handle). ``args`` may be reused at once."""
        code = input_code if stage == "dispatch_send" else 0
        shape = geometry(stage, self._layout, self._machine, num_tokens)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        call(
            driver().cuLaunchKernel,
            self._functions[stage, code],
            *(shape.blocks, 1, 1),
            *(shape.threads, 1, 1),
            shape.shared_bytes,
            stream,
            ctypes.addressof(pointers),
            0,
        )

    def close(self) -> None:
        """Idempotent."""
        make_current(self._index)
        while self._modules:
            call(driver().cuModuleUnload, self._modules.pop())

    def _load(self, stage: str, code: int) -> Any:
        defines = gpu_defines(self._layout, stage, code)
        compiled = compile_kernel(source_name(stage), defines, self._arch)
        cu = driver()
        module = call(cu.cuModuleLoad, str(compiled.path).encode())
        self._modules.append(module)
        return call(cu.cuModuleGetFunction, module, stage.encode())
