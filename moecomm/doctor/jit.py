"""The CUDA toolchain: what compiles kernels for GPUs, on this machine or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moecomm.doctor.finding import Finding, absent, ok
from moecomm.errors import CompileError
from moecomm.kernels.jit.sass import INSTALL as INSTALL_DISASSEMBLER
from moecomm.kernels.jit.sass import disassembler
from moecomm.kernels.jit.toolchain import INSTALL, Toolchain

TOPIC: Final = "GPU compiler"


@dataclass(frozen=True, slots=True)
class Jit:
    """The toolchain, or why there is none that works (its message names the command to run)."""

    toolchain: Toolchain | None
    error: str | None = None
    disassembler: str | None = None


def probe(
    load: Callable[[], Toolchain] = Toolchain.load,
    find_disassembler: Callable[[], str | None] = disassembler,
) -> Jit:
    try:
        return Jit(load(), None, find_disassembler())
    except CompileError as error:
        return Jit(None, str(error))


def findings(jit: Jit) -> list[Finding]:
    if jit.toolchain is None:
        what, _, fix = (jit.error or "").partition(" Run ")
        return [absent(TOPIC, "toolchain", what.rstrip("."), fix or INSTALL)]
    chain = jit.toolchain
    libraries = f"{chain.nvrtc}, {chain.nvjitlink}, cuda.core {chain.cuda_core}"
    nvvm = f", {chain.nvvm}" if chain.nvvm is not None else ""
    archs = f"sm_{chain.archs[0]} to sm_{chain.archs[-1]}"
    found = [ok(TOPIC, "toolchain", f"{libraries}{nvvm}; {archs}")]
    if jit.disassembler is None:
        detail = "nvdisasm not found; only tests that read machine code need it"
        return [*found, absent(TOPIC, "disassembler", detail, INSTALL_DISASSEMBLER)]
    return [*found, ok(TOPIC, "disassembler", jit.disassembler)]
