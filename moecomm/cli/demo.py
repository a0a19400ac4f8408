"""``moecomm demo``: options of the demo, its progress and its exit code."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moecomm.cli.progress import stages


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LayoutOption(StrEnum):
    batched = "batched"
    grouped = "grouped"
    rank = "rank"


class DispatchDtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float8_e4m3fn = "float8_e4m3fn"


class CombineDtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class ReduceOption(StrEnum):
    receiver = "receiver"
    sender = "sender"


def demo(
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text file; without it, moecomm's own README.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that share the experts.")] = 4,
    device: Annotated[
        Device, typer.Option(help="auto: GPUs if each rank can have one, else the CPU.")
    ] = Device.auto,
    tokens: Annotated[int, typer.Option(help="Use at most so many tokens of the text.")] = 1024,
    step_tokens: Annotated[int, typer.Option(help="Tokens of one rank in one dispatch.")] = 64,
    experts: Annotated[int, typer.Option(help="Experts over all ranks.")] = 32,
    top_k: Annotated[int, typer.Option(help="Experts of one token.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of a token's vector.")] = 512,
    inner: Annotated[int, typer.Option(help="Width inside an expert.")] = 512,
    layout: Annotated[
        LayoutOption, typer.Option(help="How received rows lie.")
    ] = LayoutOption.batched,
    dtype: Annotated[
        DispatchDtype, typer.Option(help="What travels to the experts.")
    ] = DispatchDtype.bfloat16,
    combine_dtype: Annotated[
        CombineDtype, typer.Option(help="What travels back.")
    ] = CombineDtype.bfloat16,
    reduce: Annotated[
        ReduceOption, typer.Option(help="Where weights are applied (not for layout rank).")
    ] = ReduceOption.receiver,
    seed: Annotated[int, typer.Option(min=0, help="Fixes all weights.")] = 1,
) -> None:
    """Run a real mixture-of-experts layer on real text, sharded over ranks, and check it.

    The text is cut into tokens, embedded and routed; the tokens travel to the ranks that host
    their experts and back through moecomm's kernels; the output is compared with the same layer
    in plain numpy. Exit code 1 when they differ by more than rounding explains.
    """
    from moecomm.demo.report import print_report
    from moecomm.demo.session import Options, run_demo

    options = Options(
        text=text,
        ranks=ranks,
        device=device.value,
        tokens=tokens,
        step_tokens=step_tokens,
        hidden=hidden,
        inner=inner,
        experts=experts,
        top_k=top_k,
        layout=layout.value,
        dtype=dtype.value,
        combine_dtype=combine_dtype.value,
        reduce=reduce.value,
        seed=seed,
    )
    with stages() as stage:
        result = run_demo(options, stage)
    print_report(result, Console())
    if result.faults:
        raise typer.Exit(1)
