"""Every kernel, for every architecture, to a cubin: what a GPU would load, checked without one.

Cubins come from the kernel cache when nothing that they depend on has changed: 45 s on one core
when all are compiled, 1 s when none is.
"""

from __future__ import annotations

import pytest
from cubins import check_cubin, variant_id

from moecomm.kernels import source
from moecomm.kernels.geometry import gpu_block
from moecomm.kernels.jit import DEFAULT_ARCHS, compile_kernel
from moecomm.kernels.stages import STAGES, Variant, variants


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("variant", variants(), ids=variant_id)
def test_kernel(variant: Variant, arch: str) -> None:
    compiled = compile_kernel(variant.source, variant.defines, arch)
    check_cubin(compiled, variant.kernel, gpu_block(variant.layout))


def test_variants_cover_every_stage_and_source() -> None:
    stages = {variant.stage for variant in variants()}
    assert stages == set(STAGES)
    sources = {name for name in source.names() if name.endswith(".cu")} - {"codec_check.cu"}
    assert sources == {variant.source for variant in variants()}
