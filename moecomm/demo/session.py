"""The demo from options to result; printing is left to ``report``."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import moecomm as mc
from moecomm import cuda_driver
from moecomm.config import LayoutName, MoeConfig, Reduce
from moecomm.demo.layer import (
    PHASES,
    PlainResult,
    Problem,
    RankResult,
    error_bound,
    run_plain,
    run_rank,
)
from moecomm.demo.text import load_text, token_ids, tokenise
from moecomm.demo.traffic import Traffic, count_traffic
from moecomm.errors import ConfigError, MoecommError
from moecomm.kernels.jit import Toolchain


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can choose. ``tokens``: at most so many of the text; ``step_tokens``:
    of one rank in one dispatch; ``inner``: width inside an expert."""

    text: Path | None = None
    ranks: int = 4
    device: str = "auto"
    tokens: int = 1024
    step_tokens: int = 64
    hidden: int = 512
    inner: int = 512
    experts: int = 32
    top_k: int = 8
    layout: LayoutName = "batched"
    dtype: str = "bfloat16"
    combine_dtype: str = "bfloat16"
    reduce: Reduce = "receiver"
    seed: int = 1
    timeout_s: float = 120.0

    def config(self) -> MoeConfig:
        """Raises ConfigError where a value breaks a rule."""
        return MoeConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.step_tokens,
            dispatch_dtype=self.dtype,
            scale_block=128 if self.dtype == "float8_e4m3fn" else None,
            combine_dtype=self.combine_dtype,
            layout=self.layout,
            reduce=self.reduce,
        )

    def check(self) -> None:
        """Raise ConfigError for what ``MoeConfig`` does not look at."""
        for name in ("ranks", "tokens", "inner"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}: must be 'auto', 'cpu' or 'cuda'")


@dataclass(frozen=True, slots=True)
class Result:
    """All that the report shows. ``out`` [T, H] float32 of the sharded layer."""

    source: str
    options: Options
    device: str
    problem: Problem
    ranks: list[RankResult]
    plain: PlainResult
    traffic: Traffic
    out: np.ndarray
    plain_s: float
    sharded_s: float

    @property
    def max_error(self) -> float:
        return float(np.abs(self.out - self.plain.out).max())

    @property
    def max_output(self) -> float:
        return float(np.abs(self.plain.out).max())

    @property
    def worst_share(self) -> float:
        """Largest error as a share of what rounding explains; above 1 the layer is wrong."""
        error = np.abs(self.out - self.plain.out)
        return float((error / error_bound(self.plain, self.problem.cfg)).max())

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty when everything agrees."""
        found = []
        if not np.isfinite(self.out).all():
            found.append("the sharded output has values that are not finite")
        elif self.worst_share > 1:
            found.append(
                f"the sharded output is off by {self.max_error:.3g}, "
                f"{self.worst_share:.1f} times what rounding explains"
            )
        received = np.concatenate([rank.received for rank in self.ranks])
        if not np.array_equal(received, self.traffic.load):
            found.append("the experts did not receive the tokens that the router sent them")
        if not np.array_equal([rank.copies for rank in self.ranks], self.traffic.per_rank):
            found.append("the kernels did not send one copy per (token, rank)")
        return found

    def seconds(self, phase: str) -> tuple[float, float]:
        """Mean and largest over the ranks."""
        times = [rank.seconds[phase] for rank in self.ranks]
        return sum(times) / len(times), max(times)


def run_demo(options: Options, stage: Callable[[str], None]) -> Result:
    """Run both layers. ``stage`` is told what begins, in words for a person.

    Raises:
        ConfigError: an option breaks a rule, or the text cannot be used.
        MoecommError: what a rank raised.
    """
    options.check()
    cfg, device = options.config(), resolve_device(options.device, options.ranks)
    stage("reading and embedding the text")
    source, text = load_text(options.text)
    ids = token_ids(tokenise(text)[: options.tokens])
    problem = Problem(
        ids=ids, num_ranks=options.ranks, cfg=cfg, inner=options.inner, seed=options.seed
    )
    stage("running the layer without ranks, in numpy")
    start = time.perf_counter()
    plain = run_plain(problem)
    plain_s = time.perf_counter() - start
    stage(f"running it on {options.ranks} ranks (the first time also compiles the kernels)")
    start = time.perf_counter()
    ranks = mc.run(run_rank, options.ranks, problem, device=device, timeout_s=options.timeout_s)
    return Result(
        source=source,
        options=options,
        device=device,
        problem=problem,
        ranks=ranks,
        plain=plain,
        traffic=count_traffic(problem, plain.routing),
        out=np.concatenate([rank.out.astype(np.float32) for rank in ranks]),
        plain_s=plain_s,
        sharded_s=time.perf_counter() - start,
    )


def resolve_device(device: str, num_ranks: int) -> str:
    """``auto``: GPUs where there is one for every rank, and all that using them takes; else CPU."""
    if device != "auto":
        return device
    try:
        Toolchain.load()
        enough = cuda_driver.device_count() >= num_ranks
    except MoecommError:
        enough = False
    return "cuda" if enough and importlib.util.find_spec("torch") is not None else "cpu"


__all__ = ["PHASES", "Options", "Result", "resolve_device", "run_demo"]
