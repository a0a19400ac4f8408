"""Every kernel, for every architecture, to a cubin: what a GPU would load, checked without one.

Cubins come from the kernel cache when nothing that they depend on has changed: 45 s on one core
when all are compiled, 1 s when none is.
"""

from __future__ import annotations

import pytest

from moecomm.kernels import source
from moecomm.kernels.geometry import gpu_block
from moecomm.kernels.jit import DEFAULT_ARCHS, compile_kernel, elf
from moecomm.kernels.stages import STAGES, Variant, variants

REGISTERS_PER_SM = 65536


def _id(variant: Variant) -> str:
    return f"{variant.label} {variant.stage} {variant.input_code}".replace(" ", "-")


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("variant", variants(), ids=_id)
def test_kernel(variant: Variant, arch: str) -> None:
    compiled = compile_kernel(variant.source, variant.defines, arch)
    assert compiled.kernels == (variant.kernel,)
    needs = compiled.resources[variant.kernel]
    assert not needs.spills
    assert needs.stack_bytes == 0
    # Every block that the launcher counts on fits on a multiprocessor at once.
    block = gpu_block(variant.layout)
    assert needs.registers * block.threads * block.per_sm <= REGISTERS_PER_SM
    code = [
        name for name in elf.section_sizes(compiled.path.read_bytes()) if name.startswith(".text.")
    ]
    assert code == [f".text.{variant.kernel}"]  # all functions are inlined


def test_variants_cover_every_stage_and_source() -> None:
    stages = {variant.stage for variant in variants()}
    assert stages == set(STAGES)
    sources = {name for name in source.names() if name.endswith(".cu")} - {"codec_check.cu"}
    assert sources == {variant.source for variant in variants()}
