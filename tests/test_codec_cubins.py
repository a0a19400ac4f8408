"""Codecs in cubins: inlined, without stack, within the registers that the launcher counts on.

About 20 s on one core when all are compiled.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from codec_examples import Int8PerToken, Steps16, Truncated
from cubins import REGISTERS_PER_SM, check_cubin

import moecomm as mc
from moecomm import dtypes
from moecomm.kernels import coding
from moecomm.kernels.codec_check import compile_check
from moecomm.kernels.geometry import gpu_block
from moecomm.kernels.jit import DEFAULT_ARCHS, Compiled, compile_kernel, disassemble
from moecomm.kernels.stages import gpu_defines, kernel_name
from moecomm.layout import Layout

BASE: dict[str, Any] = {"num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens": 128}
STAGES = ("dispatch_send", "dispatch_recv")
# What a division calls for numbers that are not normal: the compiler's own, in every kernel that
# divides. It is within the kernel, which has one section of code.
DIVISION = re.compile(r"CALL\.REL\.NOINC `\(\$__internal_\d+_\$__cuda_\w+\)")
BRANCH = re.compile(r"CALL\.REL\.NOINC `\(\.L_x_\d+\)")  # sm_80 leaves some loops by them


def build(codec: mc.Codec, wire: str, stage: str, arch: str) -> tuple[Compiled, Layout]:
    cfg = mc.MoeConfig(**BASE, codec=codec, decode_to="bfloat16", layout="grouped", wire=wire)
    layout = Layout(cfg, 8, 0)
    defines = gpu_defines(layout, stage, dtypes.BF16)
    link = coding.link_inputs(cfg, stage, arch)
    return compile_kernel(f"{kernel_name(layout, stage)}.cu", defines, arch, link=link), layout


def calls(compiled: Compiled) -> list[str]:
    (text,) = disassemble(compiled.path).values()
    return [line for line in text.splitlines() if "CALL" in line]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("wire", "arch"), [*(("lines", a) for a in DEFAULT_ARCHS), ("flags", "sm_90")]
)
def test_int8_is_inlined(wire: str, stage: str, arch: str) -> None:
    compiled, layout = build(Int8PerToken, wire, stage, arch)
    check_cubin(compiled, kernel_name(layout, stage), gpu_block(stage, layout))
    assert b"moe_codec" not in compiled.path.read_bytes()
    others = [line for line in calls(compiled) if not DIVISION.search(line)]
    assert [line for line in others if arch != "sm_80" or not BRANCH.search(line)] == []


@pytest.mark.parametrize("codec", [mc.codecs.fp8(128)], ids=str)
def test_other_codecs_are_inlined_too(codec: mc.Codec) -> None:
    for stage in STAGES:
        compiled, layout = build(codec, "lines", stage, "sm_90")
        needs = compiled.resources[kernel_name(layout, stage)]
        assert needs.stack_bytes == 0
        assert needs.registers * 1024 <= REGISTERS_PER_SM
        assert b"moe_codec" not in compiled.path.read_bytes()
        assert [line for line in calls(compiled) if not DIVISION.search(line)] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_codec_without_divisions_has_no_call_at_all(stage: str) -> None:
    compiled, _ = build(Truncated, "lines", stage, "sm_90")
    assert calls(compiled) == []


def test_products_and_sums_are_rounded_apart() -> None:
    """`value * inverse + 3.0` is two instructions, as in Python; one would round once."""
    compiled = compile_check(Steps16, "sm_90")
    (text,) = disassemble(compiled.path).values()
    code = re.split(r"\bEXIT\b", text)
    assert any("FMUL" in part and "FADD" in part for part in code)
    fused = [line for line in text.splitlines() if re.match(r"(@\S+ )?FFMA\b", line)]
    division = [line for line in calls(compiled) if DIVISION.search(line)]
    # Newton's steps of the one division are fused, and nothing else.
    assert len(division) == 1
    assert len(fused) <= 16


def test_it_is_compiled_once(cold_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = build(Truncated, "lines", "dispatch_send", "sm_90")
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    again, _ = build(Truncated, "lines", "dispatch_send", "sm_90")
    assert again.cached
    assert again.path == first.path
    with pytest.raises(mc.CompileError, match="moe_codec_decode of codec Truncated is not compil"):
        build(Truncated, "lines", "dispatch_recv", "sm_90")
