"""Launching the stages on a GPU: cubins loaded once, arguments in a block of fixed place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moecomm import env
from moecomm.cuda_driver import attribute, call, check, current
from moecomm.kernels import coding
from moecomm.kernels.args import ArgBlock
from moecomm.kernels.codec_check import check_on_gpu
from moecomm.kernels.geometry import (
    Grain,
    Machine,
    geometry,
    gpu_grain,
    gpu_machine,
    shared_bytes,
)
from moecomm.kernels.jit import Compiled, LinkInput, compile_kernel
from moecomm.kernels.stages import gpu_defines, kernel_name, stage_kernels, stages
from moecomm.layout import Layout

MAX_READY: Final = 4096  # one a kernel, size and stream
SHARED_BYTES: Final = 48 << 10  # what a kernel may have without asking


def _may_start_early(stage: str, shared: bool) -> bool:
    """A sending half that has started early only waits, for its own rank's kernels; where those
    wait for somebody else on the same GPU, it would hold the room which that one needs."""
    if stage.endswith(("_recv", "_pull")):
        return True
    return not shared and not stage.endswith("_push")


class GpuKernels:
    """The stages of one communicator on device ``index``.

    Compiled and loaded at construction, with every attribute set: the first launch may be inside
    a graph capture, where none of that is allowed. ``link``: what every one of them is linked with.
    ``shared``: others compute on the same GPU that this rank's kernels wait for.
    """

    def __init__(
        self,
        layout: Layout,
        index: int,
        link: Sequence[LinkInput] = (),
        *,
        shared: bool = True,
    ) -> None:
        self._index = index
        self._shared = shared
        self._link = link
        self._layout = layout
        self._grains = {stage: self._cut(stage) for stage in stages(layout)}
        multiprocessors = attribute(index, "MULTIPROCESSOR_COUNT")
        self._machines = {stage: self._machine(stage, multiprocessors) for stage in stages(layout)}
        major = attribute(index, "COMPUTE_CAPABILITY_MAJOR")
        minor = attribute(index, "COMPUTE_CAPABILITY_MINOR")
        self._arch = f"sm_{major}{minor}"
        self._modules: list[Any] = []
        self._ready: dict[tuple[str, int, int, int], tuple[Any, Any]] = {}
        # Programmatic dependent launch: the kernels ask for it on sm_90 and later.
        self._early_start = major >= 9 and not env.flag("NO_EARLY_START")
        if layout.cfg.coded is not None:
            check_on_gpu(layout.cfg.coded, index, self._arch)
        with current(index) as cu:
            self._cu = cu
            self._launch = cu.cuLaunchKernelEx
            self._success = cu.CUresult.CUDA_SUCCESS
            # Of a default stream, which is the current context's, where that is not this device's.
            # Asking for the context before each launch would take 0.6 µs more.
            self._elsewhere = (
                cu.CUresult.CUDA_ERROR_INVALID_HANDLE, cu.CUresult.CUDA_ERROR_INVALID_CONTEXT
            )  # fmt: skip
            self._functions = {
                (stage, code): self._load(stage, code) for stage, code in stage_kernels(layout)
            }

    def launch(
        self,
        stage: str,
        block: ArgBlock,
        num_tokens: int,
        input_code: int,
        stream: int,
        *,
        in_order: bool = False,
    ) -> None:
        """Queue one stage on ``stream``, a CUDA stream handle. ``in_order``: on that
        stream it never starts early."""
        ready = self._ready.get((stage, input_code, num_tokens, stream))
        if ready is None:
            ready = self._make_ready(stage, input_code, num_tokens, stream, in_order)
        config, function = ready
        (status,) = self._launch(config, function, block.pointers, 0)
        if status is not self._success:
            if status in self._elsewhere:  # nothing was launched
                with current(self._index):
                    (status,) = self._launch(config, function, block.pointers, 0)
            check(status, f"launching {stage}")

    @property
    def modules(self) -> list[Any]:
        """The loaded CUmodules."""
        return list(self._modules)

    def close(self) -> None:
        """Idempotent."""
        with current(self._index) as cu:
            while self._modules:
                call(cu.cuModuleUnload, self._modules.pop())

    def _make_ready(
        self, stage: str, input_code: int, num_tokens: int, stream: int, in_order: bool
    ) -> tuple[Any, Any]:
        """What a launch takes, kept: making it takes longer than launching."""
        if len(self._ready) >= MAX_READY:  # somebody makes streams anew all the time
            self._ready.clear()
        config = self._config(stage, num_tokens, stream, in_order)
        ready = config, self._functions[stage, input_code]
        self._ready[stage, input_code, num_tokens, stream] = ready
        return ready

    def _config(self, stage: str, num_tokens: int, stream: int, in_order: bool) -> Any:
        cu = self._cu
        shape = geometry(
            stage, self._layout, self._machines[stage], num_tokens, self._grains[stage]
        )
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
        config.sharedMemBytes = shape.shared_bytes
        config.hStream = cu.CUstream(stream)
        early = cu.CUlaunchAttribute()
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        if self._early_start and not in_order and _may_start_early(stage, self._shared):
            config.attrs, config.numAttrs = [early], 1
        return config

    def _cut(self, stage: str) -> Grain:
        return gpu_grain(stage, self._layout)

    def _machine(self, stage: str, multiprocessors: int) -> Machine:
        return gpu_machine(stage, self._layout, multiprocessors)

    def _compile(self, stage: str, code: int) -> tuple[str, Compiled]:
        """The kernel's name, and its cubin."""
        defines = gpu_defines(self._layout, stage, code)
        kernel = kernel_name(self._layout, stage)
        link = [*coding.link_inputs(self._layout.cfg, stage, self._arch), *self._link]
        return kernel, compile_kernel(f"{kernel}.cu", defines, self._arch, link=link)

    def _load(self, stage: str, code: int) -> Any:
        kernel, compiled = self._compile(stage, code)
        cu = self._cu
        module = call(cu.cuModuleLoad, str(compiled.path).encode())
        self._modules.append(module)
        function = call(cu.cuModuleGetFunction, module, kernel.encode())
        needed = shared_bytes(stage, self._layout, self._machines[stage].threads)
        if needed > SHARED_BYTES:
            name = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, function, name, needed)
        if hasattr(cu, "cuFuncLoad"):  # else the driver loads it at its first launch
            call(cu.cuFuncLoad, function)
        return function
