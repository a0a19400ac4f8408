"""The four stages of the direct protocol: which source, and what each is compiled with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from moecomm import dtypes
from moecomm.config import MoeConfig
from moecomm.kernels import coding
from moecomm.kernels.geometry import (
    EMULATOR,
    SMEM_STRUCT_BYTES,
    Grain,
    gpu_block,
    gpu_grain,
    is_bounce,
)
from moecomm.layout import Layout
from moecomm.remote import Remote

STAGES: Final = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "release")
# A bounce: the kernel that follows a sending stage, and the one ahead of a receiving stage.
PUSH: Final = {"dispatch_send": "dispatch_push", "combine_send": "combine_push"}
PULL: Final = {"dispatch_recv": "dispatch_pull", "combine_recv": "combine_pull"}
BOUNCE_STAGES: Final = (*PUSH.values(), *PULL.values())
CAST_INPUTS: Final = ("bfloat16", "float16", "float32")


def kernel_name(layout: Layout, stage: str) -> str:
    """The kernel of a stage; its source is ``<name>.cu``."""
    return f"{stage}_lines" if layout.lines and stage != "release" else stage


def stages(layout: Layout) -> tuple[str, ...]:
    """Those that ``layout`` has."""
    return (*STAGES, *BOUNCE_STAGES) if has_bounce(layout) else STAGES


def has_bounce(layout: Layout) -> bool:
    return layout.remote is not None and layout.remote.bounce


def in_line(layout: Layout, stage: str) -> tuple[str, ...]:
    """What runs, in this order, for one half."""
    if not has_bounce(layout):
        return (stage,)
    return tuple(name for name in (PULL.get(stage), stage, PUSH.get(stage)) if name)


def input_codes(cfg: MoeConfig) -> list[int]:
    """Element types that ``x`` may have: each is a dispatch_send of its own."""
    if cfg.coded is not None:
        return [dtypes.code(name) for name in CAST_INPUTS]
    wire = dtypes.code(cfg.dispatch_dtype)
    casts = [dtypes.code(name) for name in CAST_INPUTS] if wire == dtypes.F8E4M3 else []
    return [wire, *casts]


def stage_kernels(layout: Layout) -> list[tuple[str, int]]:
    """Every stage, with the code of each element type that its input may have; 0: it has none."""
    codes = {"dispatch_send": input_codes(layout.cfg)}
    return [(stage, code) for stage in stages(layout) for code in codes.get(stage, [0])]


def dtype_defines(layout: Layout, stage: str, input_code: int) -> dict[str, int]:
    """Element types of one stage; those it does not use are fixed, so that it compiles once."""
    cfg = layout.cfg
    wire = combine = dtypes.BF16
    if is_bounce(stage):
        pass  # copies bytes, of whatever type
    elif stage.startswith("dispatch"):
        wire = coding.wire_code(cfg)
    elif stage.startswith("combine"):
        combine = dtypes.code(cfg.combine_dtype)
    return {
        "SMEM_STRUCT_BYTES": SMEM_STRUCT_BYTES,
        "INPUT_DTYPE": input_code if stage == "dispatch_send" else dtypes.BF16,
        "WIRE_DTYPE": wire,
        "RECV_DTYPE": coding.recv_code(cfg) if stage == "dispatch_recv" else wire,
        "COMBINE_DTYPE": combine,
        **coding.switches(cfg, stage),
    }


def gpu_defines(layout: Layout, stage: str, input_code: int) -> dict[str, int | str]:
    """Everything is a literal: a GPU kernel is compiled for its very problem."""
    block = gpu_block(stage, layout)
    shape = {
        "BLOCK_THREADS": block.threads,
        "SM_BLOCKS": block.per_sm,
        **gpu_grain(stage, layout).constants,
    }
    remote = {"HAS_REMOTE": layout.constants["REMOTE"]}
    codec = coding.constants(layout) if coding.calls(layout.cfg, stage) else {}
    own = dtype_defines(layout, stage, input_code)
    return {**layout.defines(), **codec, **shape, **remote, **own}


def emulator_defines(layout: Layout, stage: str, input_code: int) -> dict[str, int | str]:
    """Numbers come from a table at run time: one compile a dtype serves every problem."""
    names = [*layout.constants, *Grain(False, 1).constants]
    if coding.calls(layout.cfg, stage):
        names += [*coding.constants(layout), *coding.address_names(), coding.INPUT]
        input_code = dtypes.BF16  # any: all of them are one program
    table = {name: f"(emu::config()[{i}])" for i, name in enumerate(names)}
    shape = {"BLOCK_THREADS": EMULATOR.threads, "SM_BLOCKS": 1, "HAS_REMOTE": 1}
    return {**table, **shape, **dtype_defines(layout, stage, input_code)}


def emulator_table(layout: Layout, cut: Grain) -> list[int]:
    """What ``emulator_defines`` looks up; addresses of functions are this process's own. With a
    codec, the input's code comes behind it.

    Raises: ``CodecError``, ``CompileError``: the codec's functions cannot be called.
    """
    numbers = [*layout.constants.values(), *cut.constants.values()]
    numbers += coding.constants(layout).values()
    return numbers + coding.addresses(layout.cfg.coded)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile: a stage for a problem."""

    label: str
    stage: str
    layout: Layout
    input_code: int

    @property
    def kernel(self) -> str:
        return kernel_name(self.layout, self.stage)

    @property
    def source(self) -> str:
        return f"{self.kernel}.cu"

    @property
    def defines(self) -> dict[str, int | str]:
        return gpu_defines(self.layout, self.stage, self.input_code)


def variants() -> list[Variant]:
    """Kernels that together take every compile-time branch: dtypes, layouts, both wires, both
    reductions, a cap, replicas, odd sizes, remote peers that a host thread serves."""
    base: dict[str, Any] = {"num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens": 128}
    fp8: dict[str, Any] = {**base, "dispatch_dtype": "float8_e4m3fn", "scale_block": 128}
    cases = {
        "fp8 batched": (MoeConfig(**fp8), 8),
        "fp8 flags": (MoeConfig(**fp8, wire="flags"), 8),
        "fp8 grouped": (
            MoeConfig(**{**fp8, "max_tokens": 4096}, layout="grouped", expert_alignment=128),
            8,
        ),
        "fp8 rank": (MoeConfig(**fp8, layout="rank"), 8),
        "fp8 long": (MoeConfig(**{**fp8, "max_tokens": 512}, reduce="sender"), 2),
        "fp8 pow2": (MoeConfig(**fp8, scale_pow2=True), 8),
        "bf16 sender": (MoeConfig(**base, reduce="sender"), 8),
        "bf16 sender flags": (MoeConfig(**base, reduce="sender", wire="flags"), 8),
        "bf16 capped": (MoeConfig(**base, layout="grouped", max_recv_tokens=512), 8),
        "fp16 replicas": (
            MoeConfig(**base, dispatch_dtype="float16", combine_dtype="float16", replicas=2),
            8,
        ),
        "fp32 odd": (
            MoeConfig(
                num_experts=13,
                top_k=5,
                hidden=203,
                max_tokens=67,
                dispatch_dtype="float32",
                combine_dtype="float32",
                layout="rank",
                max_recv_tokens=50,
            ),
            3,
        ),
        "top-32 of 2048": (
            MoeConfig(num_experts=2048, top_k=32, hidden=2880, max_tokens=64, layout="grouped"),
            64,
        ),
    }
    proxied = {
        "bf16 proxied": (MoeConfig(**base, reduce="sender", replicas=2), 16),
        "fp16 rank proxied": (
            MoeConfig(**base, dispatch_dtype="float16", layout="rank", max_recv_tokens=512),
            16,
        ),
    }
    layouts = {label: Layout(cfg, ranks, 0) for label, (cfg, ranks) in cases.items()}
    for label, (cfg, ranks) in proxied.items():
        layouts[label] = Layout(cfg, ranks, 0, Remote(mode="proxied", bounce=True))
    return [
        Variant(label, stage, layout, code)
        for label, layout in layouts.items()
        for stage, code in stage_kernels(layout)
    ]
