"""Every kernel, for every architecture, to a cubin: what a GPU would load, checked without one.

Cubins come from the kernel cache when nothing that they depend on has changed: 45 s on one core
when all are compiled, 1 s when none is.
"""

from __future__ import annotations

import pytest
from cubins import check_cubin, check_registers, variant_id

from moecomm.config import MoeConfig
from moecomm.kernels import source
from moecomm.kernels.geometry import MANY_LINES_RECV, MANY_LINES_SEND, gpu_block
from moecomm.kernels.jit import DEFAULT_ARCHS, compile_kernel
from moecomm.kernels.stages import BOUNCE_STAGES, STAGES, Variant, input_codes, variants
from moecomm.layout import Layout

MANY_LINES = MoeConfig(
    num_experts=256, top_k=8, hidden=7168, max_tokens=512, layout="rank",
    dispatch_dtype="float8_e4m3fn", scale_block=128,
)  # fmt: skip
SPILL = 16  # bytes that 48 registers may cost, two pieces a warp: on sm_80 only


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("variant", variants(), ids=variant_id)
def test_kernel(variant: Variant, arch: str) -> None:
    compiled = compile_kernel(variant.source, variant.defines, arch)
    check_cubin(compiled, variant.kernel, gpu_block(variant.stage, variant.layout))


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("stage", STAGES[:4])
def test_many_lines_spill_little(stage: str, arch: str) -> None:
    """A sending block and four that receive fit on a multiprocessor at once."""
    layout = Layout(MANY_LINES, 2, 0)
    block = gpu_block(stage, layout)
    assert block == (MANY_LINES_SEND if stage.endswith("send") else MANY_LINES_RECV)
    code = input_codes(MANY_LINES)[0] if stage == "dispatch_send" else 0
    variant = Variant("many lines", stage, layout, code)
    compiled = compile_kernel(variant.source, variant.defines, arch)
    check_registers(compiled, variant.kernel, block)
    assert compiled.resources[variant.kernel].spill_store_bytes <= SPILL


def test_variants_cover_every_stage_and_source() -> None:
    stages = {variant.stage for variant in variants()}
    assert stages == {*STAGES, *BOUNCE_STAGES}
    sources = {name for name in source.names() if name.endswith(".cu")} - {"codec_check.cu"}
    assert sources == {variant.source for variant in variants()}
