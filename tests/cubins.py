"""What every cubin must keep, whatever language its kernel is in."""

from __future__ import annotations

from typing import Final

from moecomm.kernels.geometry import Block
from moecomm.kernels.jit import Compiled, elf
from moecomm.kernels.stages import Variant

REGISTERS_PER_SM: Final = 65536


def variant_id(variant: Variant) -> str:
    return f"{variant.label} {variant.stage} {variant.input_code}".replace(" ", "-")


def check_cubin(compiled: Compiled, kernel: str, block: Block) -> None:
    """Nothing is kept outside of registers, all functions are inlined, and every block that the
    launcher counts on fits on a multiprocessor at once."""
    assert compiled.kernels == (kernel,)
    needs = compiled.resources[kernel]
    assert not needs.spills
    assert needs.stack_bytes == 0
    check_registers(compiled, kernel, block)
    sections = elf.section_sizes(compiled.path.read_bytes())
    assert [name for name in sections if name.startswith(".text.")] == [f".text.{kernel}"]


def check_registers(compiled: Compiled, kernel: str, block: Block) -> None:
    needs = compiled.resources[kernel]
    assert needs.registers * block.threads * block.per_sm <= REGISTERS_PER_SM
