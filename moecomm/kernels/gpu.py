"""Launching the stages on a GPU: cubins loaded once, arguments in a block of fixed place."""

from __future__ import annotations

from typing import Any, Final

from moecomm.cuda_driver import attribute, call, check, current
from moecomm.kernels.args import ArgBlock
from moecomm.kernels.geometry import Geometry, Machine, geometry, shared_bytes
from moecomm.kernels.jit import compile_kernel
from moecomm.kernels.stages import STAGES, gpu_defines, input_codes, kernel_name
from moecomm.layout import Layout

THREADS: Final = 512  # a 7168-column row is one or two 16-byte chunks a thread
BLOCKS_PER_SM: Final = 2
MAX_STREAMS: Final = 64  # objects kept
SHARED_BYTES: Final = 48 << 10  # what a kernel may have without asking


class GpuKernels:
    """The stages of one communicator on device ``index``.

    Compiled and loaded at construction, with every attribute set: the first launch may be inside
    a graph capture, where none of that is allowed.
    """

    def __init__(self, layout: Layout, index: int) -> None:
        self._index = index
        self._layout = layout
        self._machine = Machine(BLOCKS_PER_SM * attribute(index, "MULTIPROCESSOR_COUNT"), THREADS)
        major = attribute(index, "COMPUTE_CAPABILITY_MAJOR")
        minor = attribute(index, "COMPUTE_CAPABILITY_MINOR")
        self._arch = f"sm_{major}{minor}"
        self._modules: list[Any] = []
        self._shapes: dict[tuple[str, int], Geometry] = {}
        self._streams: dict[int, Any] = {}  # handle → the driver package's object for it
        with current(index) as cu:
            self._cu = cu
            self._launch = cu.cuLaunchKernel
            self._success = cu.CUresult.CUDA_SUCCESS
            self._functions = {
                (stage, code): self._load(stage, code)
                for stage in STAGES
                for code in (input_codes(layout.cfg) if stage == "dispatch_send" else [0])
            }

    def launch(
        self, stage: str, block: ArgBlock, num_tokens: int, input_code: int, stream: int
    ) -> None:
        """Queue one stage on ``stream``, a CUDA stream handle; the device is current."""
        shape = self._shapes.get((stage, num_tokens)) or self._shape(stage, num_tokens)
        (status,) = self._launch(
            self._functions[stage, input_code],
            shape.blocks,
            1,
            1,
            shape.threads,
            1,
            1,
            shape.shared_bytes,
            self._streams.get(stream) or self._stream(stream),
            block.pointers,
            0,
        )
        if status is not self._success:
            check(status, f"launching {stage}")

    def close(self) -> None:
        """Idempotent."""
        with current(self._index) as cu:
            while self._modules:
                call(cu.cuModuleUnload, self._modules.pop())

    def _shape(self, stage: str, num_tokens: int) -> Geometry:
        found = geometry(stage, self._layout, self._machine, num_tokens)
        self._shapes[stage, num_tokens] = found
        return found

    def _stream(self, handle: int) -> Any:
        if len(self._streams) >= MAX_STREAMS:  # somebody makes them anew all the time
            self._streams.clear()
        found = self._cu.CUstream(handle)
        self._streams[handle] = found
        return found

    def _load(self, stage: str, code: int) -> Any:
        defines = gpu_defines(self._layout, stage, code)
        kernel = kernel_name(self._layout, stage)
        compiled = compile_kernel(f"{kernel}.cu", defines, self._arch)
        cu = self._cu
        module = call(cu.cuModuleLoad, str(compiled.path).encode())
        self._modules.append(module)
        function = call(cu.cuModuleGetFunction, module, kernel.encode())
        needed = shared_bytes(stage, self._layout, THREADS)
        if needed > SHARED_BYTES:
            name = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, function, name, needed)
        if hasattr(cu, "cuFuncLoad"):  # else the driver loads it at its first launch
            call(cu.cuFuncLoad, function)
        return function
