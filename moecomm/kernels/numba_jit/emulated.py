"""The kernels in Python, launched in the emulator: numba's machine code, linked with shim.cuh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moecomm.emulator import EmulatorProgram
from moecomm.emulator.build import build_object
from moecomm.kernels import source
from moecomm.kernels.args import ARG_FIELDS
from moecomm.kernels.emulated import EmulatedKernels
from moecomm.kernels.geometry import BY_BLOCKS, EMULATOR, Grain, Machine
from moecomm.kernels.numba_jit.cpu import numba_symbol, object_file
from moecomm.kernels.numba_jit.lowered import Lowered, files, lower
from moecomm.kernels.numba_jit.problem import numbers
from moecomm.kernels.numba_jit.sources import Sources
from moecomm.kernels.stages import STAGES
from moecomm.layout import Layout

if TYPE_CHECKING:
    from moecomm.emulator.simulation import Simulation

NAME: Final = "python_kernels"
_ENTRY: Final = """
extern "C" void moe_enter_{stage}(const u64* fields);
extern "C" __global__ void {stage}(Args a) {{ moe_enter_{stage}(a.fields); }}
"""
_THUNKS: Final = """
typedef long long i64;
extern "C" void moe_raised(const char*);
"""
_THUNK: Final = """
extern "C" int {numba}(i64*, void**{types});
extern "C" i64 {symbol}({parameters})
{{
    i64 result = 0;
    void* error = nullptr;
    if ({numba}(&result, &error{arguments})) moe_raised("{name} has raised an exception");
    return result;
}}
"""


class EmulatedPythonKernels(EmulatedKernels):
    """As ``EmulatedKernels``. ``sources`` are the kernels' files."""

    def __init__(
        self,
        layout: Layout,
        simulation: Simulation | None,
        sources: Sources,
        machine: Machine = EMULATOR,
    ) -> None:
        self._all_stages = program(sources)
        super().__init__(layout, simulation, machine)

    def _cut(self, stage: str) -> Grain:
        return BY_BLOCKS

    def _program(self, stage: str, input_code: int) -> EmulatorProgram:
        return self._all_stages

    def _table(self, stage: str, input_code: int) -> tuple[int, ...]:
        return tuple(numbers(self._layout, stage, input_code, self._machine.threads))


@functools.lru_cache(maxsize=16)
def program(sources: Sources) -> EmulatorProgram:
    """All stages, as one program: compiled once, whatever the problem.

    Raises:
        ConfigError: a kernel file says what a kernel cannot.
    """
    lowered = lower(sources, *STAGES)
    text = source.bundle("shim.cuh", {}) + f"struct Args {{ u64 fields[{len(ARG_FIELDS)}]; }};"
    text += "".join(_ENTRY.format(stage=stage) for stage in STAGES)

    def objects() -> Sequence[Path]:
        thunks = build_object(_thunks(sources, lowered), NAME)
        return [*files(lowered, object_file), thunks]

    return EmulatorProgram(text, name=NAME, kernels=STAGES, objects=objects)


def _thunks(sources: Sources, lowered: Sequence[Lowered]) -> str:
    """C++ between kernels and numba: a plain C function for each of numba's, and each stage's
    beginning, which hands over the fields of ``Args`` that it needs."""
    text = _THUNKS
    for part in lowered:
        names = [f"a{i}" for i in range(part.num_parameters)]
        text += _THUNK.format(
            numba=numba_symbol(part),
            symbol=part.symbol,
            name=part.name,
            types=", i64" * len(names),
            parameters=", ".join(f"i64 {name}" for name in names),
            arguments="".join(f", {name}" for name in names),
        )
    entries = {part.name: part for part in lowered}
    for stage in STAGES:
        fields = [f"fields[{ARG_FIELDS.index(field)}]" for field in sources.fields(stage)]
        text += f'\nextern "C" void moe_enter_{stage}(const i64* fields)\n'
        text += f"{{\n    {entries[stage].symbol}({', '.join(fields)});\n}}\n"
    return text
