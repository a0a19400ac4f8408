"""What to measure: the problem, the cases made from lists of choices, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from moecomm.config import DISPATCH_DTYPES, LAYOUTS, MoeConfig
from moecomm.errors import ConfigError
from moecomm.kernels import choice

ROUTINGS: Final = ("uniform", "zipf")
FP8: Final = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of results.

    ``input_dtype``: element type of ``x``; where it differs from ``dispatch_dtype``, dispatch
    casts, and that is part of the time.
    """

    layout: str
    num_tokens: int
    dispatch_dtype: str
    input_dtype: str
    routing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that decides a run.

    Args:
        ranks: processes; they share GPUs in turn where there are fewer.
        tokens: tokens per rank, also ``max_tokens``; one case each.
        layouts, dispatch_dtypes, input_dtypes, routings: choices that are combined. For fp8
            dispatch each input dtype is a case (fp8 itself: quantised before); other dispatch
            dtypes take their own.
        pairs: dispatch and combine pairs in one graph.
        replays: timed replays of it.
        nccl: whether to time NCCL, which needs a GPU per rank.
        check_only: compare results and time nothing: for ranks that share GPUs.
        budget_s: cases that would begin later than this are skipped, so that there are results of
            the others; ``None``: none are.
        timeout_s: for everything; what is under way then has no results.
    """

    ranks: int = 2
    tokens: tuple[int, ...] = (1, 8, 64, 128, 512, 4096)
    layouts: tuple[str, ...] = ("rank",)
    dispatch_dtypes: tuple[str, ...] = (FP8,)
    input_dtypes: tuple[str, ...] = ("bfloat16",)
    routings: tuple[str, ...] = ("uniform",)
    num_experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    scale_block: int = 128
    combine_dtype: str = "bfloat16"
    reduce: str = "receiver"
    wire: str = "auto"
    expert_alignment: int = 1
    num_sms: int | None = None
    transport: str = "auto"
    kernels: str = "auto"
    pairs: int = 20
    replays: int = 200
    nccl: bool = True
    check_only: bool = False
    budget_s: float | None = None
    timeout_s: float = 600.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("layouts", LAYOUTS),
            ("dispatch_dtypes", DISPATCH_DTYPES),
            ("input_dtypes", DISPATCH_DTYPES),
            ("routings", ROUTINGS),
        ):
            for value in getattr(self, name):
                if value not in known:
                    raise ConfigError(f"{name}: {value!r} must be one of {', '.join(known)}")
        for name in ("ranks", "pairs", "replays", *(["tokens"] if not self.tokens else [])):
            if not getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least one")
        if min(self.tokens) < 1:
            raise ConfigError(f"tokens={min(self.tokens)}: must be at least 1")
        for case in self.cases():
            self.config(case)

    def cases(self) -> Iterator[Case]:
        """Every combination, smallest batches first."""
        for layout, dtype, routing, tokens in itertools.product(
            self.layouts, self.dispatch_dtypes, self.routings, sorted(self.tokens)
        ):
            inputs = self.input_dtypes if dtype == FP8 else (dtype,)
            for input_dtype in inputs:
                yield Case(
                    layout=layout,
                    num_tokens=tokens,
                    dispatch_dtype=dtype,
                    input_dtype=input_dtype,
                    routing=routing,
                )

    def config(self, case: Case) -> MoeConfig:
        """The exchange that ``case`` measures."""
        fields: dict[str, Any] = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": case.num_tokens,
            "dispatch_dtype": case.dispatch_dtype,
            "scale_block": self.scale_block if case.dispatch_dtype == FP8 else None,
            "combine_dtype": self.combine_dtype,
            "layout": case.layout,
            "reduce": "receiver" if case.layout == "rank" else self.reduce,
            "expert_alignment": self.expert_alignment if case.layout == "grouped" else 1,
            "wire": self.wire,
            "num_sms": self.num_sms,
            "timeout_s": 30.0,
        }
        return choice.fitting(MoeConfig(**fields), choice.choose(self.kernels))
