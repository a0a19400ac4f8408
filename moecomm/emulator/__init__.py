"""Runs the project's CUDA C++ kernels on a CPU: many ranks, any interleaving."""

from __future__ import annotations

from moecomm.emulator.errors import CheckFailure, Deadlock, EmulatorError
from moecomm.emulator.faults import Faults
from moecomm.emulator.process import ProcessWorld
from moecomm.emulator.program import EmulatorProgram
from moecomm.emulator.simulate import fuzz, simulate
from moecomm.emulator.simulation import Simulation

__all__ = [
    "CheckFailure",
    "Deadlock",
    "EmulatorError",
    "EmulatorProgram",
    "Faults",
    "ProcessWorld",
    "Simulation",
    "fuzz",
    "simulate",
]
