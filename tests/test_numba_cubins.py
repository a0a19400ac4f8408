"""The kernels in Python, for every architecture, to a cubin: what a GPU would load.

Cubins come from the kernel cache when nothing that they depend on has changed. Compiled anew: 30 s
on one core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cubins import check_cubin, variant_id

import moecomm as mc
from moecomm import dtypes
from moecomm.kernels.args import ARG_FIELDS
from moecomm.kernels.jit import DEFAULT_ARCHS, disassemble, elf
from moecomm.kernels.numba_jit import gpu
from moecomm.kernels.numba_jit.lowered import lower
from moecomm.kernels.numba_jit.sources import read
from moecomm.kernels.stages import STAGES, Variant

DIVISION = "__cuda_sm3x_div_rn_noftz_f32_slowpath"  # of a float32 by another, in the cast to fp8


def _cases() -> list[Any]:
    """On sm_90 everything; on the others one of the casts stands for all."""
    return [
        pytest.param(variant, arch, id=f"{variant_id(variant)}-{arch}")
        for arch in DEFAULT_ARCHS
        for variant in gpu.variants()
        if arch == "sm_90" or variant.input_code in (0, dtypes.F8E4M3)
    ]


@pytest.mark.parametrize(("variant", "arch"), _cases())
def test_kernel(variant: Variant, arch: str) -> None:
    compiled = gpu.compile_variant("numba", variant, arch)
    check_cubin(compiled, variant.stage, gpu.BLOCK)
    # The arguments lie as the host packs them: 8 bytes a field, nothing before or between.
    sections = elf.section_sizes(compiled.path.read_bytes())
    parameters = sections[f".nv.constant0.{variant.stage}"]
    assert parameters % 8 == 0
    assert parameters >= 8 * len(ARG_FIELDS)


@pytest.mark.parametrize(
    "variant", [v for v in gpu.variants() if v.input_code == 0], ids=variant_id
)
def test_every_function_is_inlined(variant: Variant) -> None:
    compiled = gpu.compile_variant("numba", variant, "sm_90")
    code = disassemble(compiled.path)[variant.stage].splitlines()
    calls = [line for line in code if "CALL" in line and DIVISION not in line]
    assert calls == []
    assert any("EXIT" in line for line in code)


def test_rows_move_sixteen_bytes_at_a_time_and_flags_are_released() -> None:
    (send,) = [v for v in gpu.variants() if v.stage == "combine_send" and "fp8" in v.label]
    code = disassemble(gpu.compile_variant("numba", send, "sm_90").path)["combine_send"]
    assert "LDG.E.NA.128" in code or "LDG.E.128" in code
    assert ".128" in "".join(line for line in code.splitlines() if line.startswith(("ST", "@")))
    assert "STRONG.SYS" in code


def test_stages_of_any_wire_have_the_flags_one() -> None:
    assert {v.layout.lines for v in gpu.variants()} == {False}
    assert {v.stage for v in gpu.variants()} == set(STAGES)


def test_what_numba_cuda_refuses_is_a_compile_error(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def rank_first_expert(rank: int) -> int:\n    return range(rank)\n")
    (part,) = [p for p in lower(read(mine), *STAGES) if p.name == "rank_first_expert"]
    with pytest.raises(mc.CompileError, match=r"mine\.py: moe_py_rank_first_expert does not"):
        gpu.compile_ltoir(part)
