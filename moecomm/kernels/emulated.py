"""Launching the stages in the emulator."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moecomm.emulator import EmulatorProgram, ProcessWorld
from moecomm.emulator.program import prepare_all
from moecomm.kernels import coding, source
from moecomm.kernels.args import Args
from moecomm.kernels.geometry import EMULATOR, Grain, Machine, geometry, grain
from moecomm.kernels.stages import (
    emulator_defines,
    emulator_table,
    kernel_name,
    stage_kernels,
    stages,
)
from moecomm.layout import Layout

if TYPE_CHECKING:
    from moecomm.emulator.simulation import Simulation


class EmulatedKernels:
    """The stages of one communicator, run on this process's CPU to their end.

    In a simulation its scheduler runs them, interleaved with the other ranks' kernels; otherwise
    the other ranks are other processes or threads.
    """

    def __init__(
        self, layout: Layout, simulation: Simulation | None, machine: Machine = EMULATOR
    ) -> None:
        self._layout = layout
        self._words: dict[str, tuple[int, ...]] = {}
        self._simulation = simulation
        self._machine = machine
        self._grains = {stage: self._cut(stage) for stage in stages(layout)}
        self._worlds: dict[tuple[EmulatorProgram, tuple[int, ...]], ProcessWorld] = {}
        coding.addresses(layout.cfg.coded)  # a codec that does not work is an error here
        checks = simulation is not None and simulation.checks
        prepare_all(
            (self._program(stage, code) for stage, code in stage_kernels(layout)), checks=checks
        )

    def launch(self, stage: str, args: Args, num_tokens: int, input_code: int) -> None:
        """Run one stage. Raises what the emulator finds: ``Deadlock``, ``CheckFailure``."""
        shape = geometry(stage, self._layout, self._machine, num_tokens, self._grains[stage])
        program, table = self._program(stage, input_code), self._table(stage, input_code)
        kernel = kernel_name(self._layout, stage)
        launch = (kernel, bytes(args), shape.blocks, shape.threads, shape.shared_bytes)
        if self._simulation is not None:
            self._simulation.launch(self._layout.rank, program, table, *launch)
            return
        if (program, table) not in self._worlds:
            self._worlds[program, table] = ProcessWorld(program, table)
        self._worlds[program, table].launch(*launch)

    def close(self) -> None:
        """Idempotent."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def _cut(self, stage: str) -> Grain:
        return grain(stage, self._layout, self._machine.max_blocks, self._machine.threads)

    def _program(self, stage: str, input_code: int) -> EmulatorProgram:
        defines = emulator_defines(self._layout, stage, input_code)
        return _program(kernel_name(self._layout, stage), tuple(defines.items()))

    def _table(self, stage: str, input_code: int) -> tuple[int, ...]:
        """What the program's configuration words are."""
        if stage not in self._words:
            self._words[stage] = tuple(emulator_table(self._layout, self._grains[stage]))
        words = self._words[stage]
        return words if self._layout.cfg.coded is None else (*words, input_code)


@functools.cache
def _program(kernel: str, defines: tuple[tuple[str, int | str], ...]) -> EmulatorProgram:
    return EmulatorProgram(source.bundle(f"{kernel}.cu", dict(defines)), name=kernel)
