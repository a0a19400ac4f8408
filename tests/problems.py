"""Random exchanges for hypothesis: any configuration, any routing, any order of halves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from exchange import Case, make_case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import moecomm as mc

# dispatch_dtype, scale_block, scale_pow2, dtype of x where it is cast, combine_dtype. Few, since
# each is compiled, for both wires.
DTYPES = (
    ("bfloat16", None, False, None, "bfloat16"),
    ("float32", None, False, None, "float32"),
    ("float8_e4m3fn", 16, False, None, "bfloat16"),
    ("float8_e4m3fn", None, False, None, "bfloat16"),
    ("float8_e4m3fn", 32, True, "bfloat16", "float32"),
)


def examples(default: int) -> Callable[[Any], Any]:
    """Settings of a property: ``default`` examples, always the same; with
    ``MOECOMM_TEST_EXAMPLES=N`` N of them, others in every run."""
    chosen = os.environ.get("MOECOMM_TEST_EXAMPLES")
    return settings(
        max_examples=int(chosen or default),
        derandomize=not chosen,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@dataclass(frozen=True)
class Problem:
    """One example. ``seed`` makes tokens, routing, weights and the order of the halves."""

    cfg: mc.MoeConfig
    num_ranks: int
    input_dtype: str | None
    seed: int
    num_steps: int
    skew: float
    dropped: float
    repeated: float

    def case(self, step: int, **changes: Any) -> Case:
        return make_case(
            dataclasses.replace(self.cfg, **changes),
            self.num_ranks,
            self.seed * 100 + step,
            input_dtype=self.input_dtype,
            skew=self.skew,
            dropped=self.dropped,
            repeated=self.repeated,
        )

    def cases(self) -> list[Case]:
        return [self.case(step) for step in range(self.num_steps)]

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@st.composite
def problems(draw: Any, *, max_ranks: int = 9, max_steps: int = 4) -> Problem:
    num_ranks = draw(st.integers(1, max_ranks))
    replicas = draw(st.sampled_from([d for d in range(1, num_ranks + 1) if num_ranks % d == 0]))
    experts = draw(st.integers(1, 20))
    layout = draw(st.sampled_from(["batched", "grouped", "rank"]))
    dispatch, block, pow2, given, combine = draw(st.sampled_from(DTYPES))
    share = st.sampled_from([0.0, 0.2, 1.0])
    cfg = mc.MoeConfig(
        num_experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        hidden=draw(st.sampled_from([1, 7, 8, 16, 40, 72, 130])),
        max_tokens=draw(st.integers(1, 7)),
        dispatch_dtype=dispatch,
        scale_block=block,
        scale_pow2=pow2,
        combine_dtype=combine,
        layout=layout,
        expert_alignment=draw(st.sampled_from([1, 2, 5, 8])) if layout == "grouped" else 1,
        replicas=replicas,
        reduce="receiver" if layout == "rank" else draw(st.sampled_from(["receiver", "sender"])),
        in_flight=draw(st.integers(1, 3)),
        wire=draw(st.sampled_from(["auto", "flags"])),  # auto: lines where a row is whole
        check_values=draw(st.booleans()),
        num_sms=draw(st.sampled_from([None, 1, 2, 3])),
        timeout_s=20.0,
    )
    return Problem(
        cfg=cfg,
        num_ranks=num_ranks,
        input_dtype=given,
        seed=draw(st.integers(0, 2**16)),
        num_steps=draw(st.integers(1, max_steps)),
        skew=draw(share),
        dropped=draw(share),
        repeated=draw(share),
    )
