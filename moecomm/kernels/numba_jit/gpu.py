"""The kernels in Python on a GPU: numba-cuda's LTO-IR, linked with shim.cuh to one cubin a stage.

numba-cuda only compiles, each function by itself, and needs no GPU for that; how the cubin is
loaded and launched is ``GpuKernels``' business, as for the CUDA C++ kernels. Constants, calls and
the machine's functions come together in the linker, which inlines all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from moecomm.cache import default_cache, key_of
from moecomm.errors import CompileError
from moecomm.kernels import choice, source
from moecomm.kernels.args import ARG_FIELDS
from moecomm.kernels.geometry import BY_BLOCKS, Block, Grain, Machine
from moecomm.kernels.gpu import GpuKernels
from moecomm.kernels.jit import Compiled, LinkInput, Toolchain, compile_source, numba_cuda
from moecomm.kernels.numba_jit.lowered import Lowered, files, lower
from moecomm.kernels.numba_jit.problem import numbers
from moecomm.kernels.numba_jit.sources import Sources
from moecomm.kernels.stages import Variant
from moecomm.kernels.stages import variants as all_variants
from moecomm.layout import Layout

FORMAT: Final = "2"  # of the LTO-IR files
ARCH: Final = "sm_80"  # LTO-IR for an older architecture links for a newer one
# Integers of 64 bits need more registers than the CUDA C++ kernels' 64.
BLOCK: Final = Block(threads=256, per_sm=3, used=3)
_ENTRY: Final = """
struct Args {{ i64 fields[{num_fields}]; }};
SHIM i64 {symbol}({types});
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) {stage}(Args a)
{{
    {symbol}({arguments});
}}
"""


class GpuPythonKernels(GpuKernels):
    """As ``GpuKernels``. ``sources`` are the kernels' files."""

    def __init__(self, layout: Layout, index: int, sources: Sources) -> None:
        self._sources = sources
        super().__init__(layout, index)

    def _cut(self, stage: str) -> Grain:
        return BY_BLOCKS

    def _machine(self, stage: str, multiprocessors: int) -> Machine:
        return Machine(BLOCK.used * multiprocessors, BLOCK.threads)

    def _compile(self, stage: str, code: int) -> tuple[str, Compiled]:
        return stage, compile_stage(self._sources, self._layout, stage, code, self._arch)


def compile_stage(
    sources: Sources, layout: Layout, stage: str, input_code: int, arch: str
) -> Compiled:
    """Return the cubin of a stage for ``layout`` and ``arch``; its kernel is called ``stage``.

    Raises:
        ConfigError: a kernel file says what a kernel cannot, or ``arch`` is not known.
        CompileError: it does not compile or link, or a package is missing.
    """
    Toolchain.load().check_arch(arch)
    values = numbers(layout, stage, input_code, BLOCK.threads)
    defines: dict[str, int | str] = {
        "CONFIG_CASES": " ".join(f"case {i}: return {v}ll;" for i, v in enumerate(values)),
        "BLOCK_THREADS": BLOCK.threads,
        "SM_BLOCKS": BLOCK.per_sm,
    }
    lowered = lower(sources, stage)
    fields = [ARG_FIELDS.index(field) for field in sources.fields(stage)]
    entry = _ENTRY.format(
        num_fields=len(ARG_FIELDS),
        symbol=next(part.symbol for part in lowered if part.name == stage),
        types=", ".join("i64" for _ in fields),
        stage=stage,
        arguments=", ".join(f"a.fields[{field}]" for field in fields),
    )
    text = source.bundle("shim.cuh", defines) + entry
    link = [LinkInput(str(file)) for file in files(lowered, ltoir_file)]
    return compile_source(f"{stage} in Python", text, arch, link=link)


def variants() -> list[Variant]:
    """Few, since the numbers of a problem change little here: with and without a cast, both
    reductions."""
    sender = ("dispatch_send", "combine_send")
    return [
        variant
        for variant in all_variants()
        if variant.label == "fp8 flags"
        or (variant.label == "bf16 sender flags" and variant.stage in sender)
    ]


def compile_variant(kernels: str, variant: Variant, arch: str) -> Compiled:
    """``compile_stage`` for the kernels of that name or path."""
    sources = choice.choose(kernels)
    assert sources is not None
    return compile_stage(sources, variant.layout, variant.stage, variant.input_code, arch)


def ltoir_file(lowered: Lowered) -> Path:
    """Return the LTO-IR of one function, compiled once for each text of it.

    Raises:
        CompileError: numba-cuda is missing, or refuses the function; the message says why, and
            where.
    """
    key = key_of(f"numba LTO-IR {FORMAT}", lowered.text, ARCH, numba_cuda.identity())

    def write(path: Path) -> None:
        path.write_bytes(compile_ltoir(lowered))

    return default_cache().get(key, ".ltoir", write, what=f"{lowered.name} in Python for GPUs")


def compile_ltoir(lowered: Lowered) -> bytes:
    """As ``ltoir_file``, without a cache."""
    cuda = numba_cuda.load()

    def external(symbol: str, num_parameters: int) -> Any:
        int64 = cuda.types.int64
        return cuda.declare_device(symbol, int64(*[int64] * num_parameters), abi="c")

    def signature(types: Any) -> Any:
        return types.int64(*[types.int64] * lowered.num_parameters)

    file = str(lowered.function.file)
    try:
        function = lowered.bind(external, file)
        return numba_cuda.device_function(
            function, signature, lowered.symbol, ARCH, inline=True, convergent=True
        )
    except CompileError as error:
        raise CompileError(f"{file}: {error}", error.log) from error
