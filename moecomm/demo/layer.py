"""The demo's layer, twice: sharded over the ranks of a group through MoeComm, and plain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import moecomm as mc
from moecomm.config import MoeConfig
from moecomm.demo.device import Host, open_device
from moecomm.demo.experts import Expert, Floats, run_experts
from moecomm.demo.router import Routing, route
from moecomm.demo.text import embed
from moecomm.dtypes import numpy_dtype
from moecomm.reference import dequantize, quantize

if TYPE_CHECKING:
    from moecomm.group import Group

PHASES: Final = (
    "set up",
    "dispatch: send",
    "dispatch: receive",
    "experts",
    "combine: send",
    "combine: receive",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What every rank is told: the tokens of the whole text and the layer's sizes.

    ``ids`` [T] int64 token ids; ``inner`` is the width F inside an expert; the ``seed`` fixes all
    weights. Each rank takes its ``share`` of the tokens, ``cfg.max_tokens`` of them a step.
    """

    ids: npt.NDArray[np.int64]
    num_ranks: int
    cfg: MoeConfig
    inner: int
    seed: int

    def share(self, rank: int) -> range:
        """Tokens of ``rank``: consecutive, and the first ``T % R`` ranks have one more."""
        each, extra = divmod(len(self.ids), self.num_ranks)
        first = rank * each + min(rank, extra)
        return range(first, first + each + (rank < extra))

    @property
    def num_steps(self) -> int:
        """Steps of every rank: those of the rank with most tokens."""
        return -(-len(self.share(0)) // self.cfg.max_tokens)

    def inputs(self, tokens: range) -> tuple[npt.NDArray[Any], Routing]:
        """Input rows, as a model would hold them, and routing of ``tokens``."""
        cfg = self.cfg
        x = embed(self.ids, tokens.start, tokens.stop, cfg.hidden, self.seed)
        routing = route(x, cfg.num_experts, cfg.top_k, self.seed)
        fp8 = cfg.dispatch_dtype == "float8_e4m3fn"  # cast inside dispatch, from bfloat16
        return x.astype(numpy_dtype("bfloat16" if fp8 else cfg.dispatch_dtype)), routing

    def expert(self, number: int) -> Expert:
        return Expert.numbered(number, self.cfg.hidden, self.inner, self.seed)


@dataclass(slots=True)
class RankResult:
    """What one rank brings back. ``out`` [T, H] of its share; ``seconds`` by phase; ``received``
    tokens by local expert; what the kernels counted by destination rank: ``copies`` of tokens,
    ``dispatch_bytes`` and ``combine_bytes``. Counts are over all steps."""

    out: npt.NDArray[Any]
    received: npt.NDArray[np.int64]
    copies: list[int] = field(default_factory=list)
    dispatch_bytes: list[int] = field(default_factory=list)
    combine_bytes: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def timed(self, phase: str, device: Host) -> Iterator[None]:
        start = time.perf_counter()
        yield
        device.wait()
        self.seconds[phase] += time.perf_counter() - start


def run_rank(group: Group, problem: Problem) -> RankResult:
    """One rank's work, called by ``mc.run`` in that rank's process."""
    cfg, share = problem.cfg, problem.share(group.rank)
    x, routing = problem.inputs(share)
    result = RankResult(
        out=np.empty((len(share), cfg.hidden), numpy_dtype(cfg.combine_dtype)),
        received=np.zeros(0, np.int64),
    )
    start = time.perf_counter()
    comm = mc.MoeComm(cfg, group)
    with comm:
        device = open_device(comm.device)
        _warm_up(comm, device, x[:0], Routing(routing.topk_idx[:0], routing.topk_weights[:0]))
        result.seconds["set up"] = time.perf_counter() - start
        hosted = [problem.expert(number) for number in comm.expert_range(group.rank)]
        result.received = np.zeros(len(hosted), np.int64)
        for step in range(problem.num_steps):
            rows = slice(step * cfg.max_tokens, (step + 1) * cfg.max_tokens)
            here = Routing(routing.topk_idx[rows], routing.topk_weights[rows])
            result.out[rows] = _step(comm, device, x[rows], here, hosted, result)
        stats = comm.stats()
    result.copies = stats.dispatch_tokens
    result.dispatch_bytes, result.combine_bytes = stats.dispatch_bytes, stats.combine_bytes
    return result


def _warm_up(comm: mc.MoeComm, device: Host, x: npt.NDArray[Any], routing: Routing) -> None:
    """An exchange of no tokens: the first use of an input's dtype may compile a kernel."""
    recv = comm.dispatch(*map(device.give, (x, *routing)))
    y = np.zeros(tuple(recv.x.shape), numpy_dtype(comm.config.combine_dtype))
    comm.combine(device.give(y), recv.handle)
    device.wait()


def _step(
    comm: mc.MoeComm,
    device: Host,
    x: npt.NDArray[Any],
    routing: Routing,
    hosted: list[Expert],
    result: RankResult,
) -> npt.NDArray[Any]:
    """x [T, H] → [T, H]: dispatch, experts, combine. A rank without tokens takes part too."""
    given = [device.give(array) for array in (x, *routing)]
    with result.timed("dispatch: send", device):
        handle = comm.dispatch_send(*given)
    with result.timed("dispatch: receive", device):
        recv = comm.dispatch_recv(handle)
    here = device.take_received(recv)
    with result.timed("experts", device):
        y = run_experts(here, hosted, comm.config)
        result.received += here.counts
    back = device.give(y)
    with result.timed("combine: send", device):
        comm.combine_send(back, handle)
    with result.timed("combine: receive", device):
        out = comm.combine_recv(handle)
    comm.check()
    return device.take(out)


@dataclass(frozen=True, slots=True)
class PlainResult:
    """The layer without ranks. ``out`` [T, H] float32; ``magnitude`` [T, H] float32, the sum of
    ``|weight * expert output|`` that rounding errors scale with; ``routing`` of all tokens."""

    out: Floats
    magnitude: Floats
    routing: Routing


def run_plain(problem: Problem) -> PlainResult:
    """The same layer in plain numpy, with all experts in one place and nothing sent.

    The rows that experts read are rounded (and, for fp8, scaled) as dispatch would, because that
    is part of the layer's definition; everything after it stays in float32.
    """
    cfg = problem.cfg
    rows, routing = problem.inputs(range(len(problem.ids)))
    x = as_dispatched(rows, cfg)
    out = np.zeros(x.shape, np.float32)
    magnitude = np.zeros(x.shape, np.float32)
    for number in range(cfg.num_experts):
        tokens, slots = np.nonzero(routing.topk_idx == number)
        if not len(tokens):
            continue
        weighted = routing.topk_weights[tokens, slots, None] * problem.expert(number)(x[tokens])
        out[tokens] += weighted
        magnitude[tokens] += np.abs(weighted)
    return PlainResult(out, magnitude, routing)


def as_dispatched(rows: npt.NDArray[Any], cfg: MoeConfig) -> Floats:
    """[T, H] float32: what an expert reads of ``rows`` [T, H] after dispatch."""
    if cfg.dispatch_dtype != "float8_e4m3fn":
        return rows.astype(numpy_dtype(cfg.dispatch_dtype)).astype(np.float32)
    quantised, scales = quantize(rows, cfg.scale_block, cfg.scale_pow2)
    return dequantize(quantised, scales, cfg.scale_block)


def error_bound(plain: PlainResult, cfg: MoeConfig) -> Floats:
    """[T, H] float32: how far the sharded output may be from the plain one, element by element.

    Half a unit in the last place of ``combine_dtype`` for every expert's row (with
    ``reduce="sender"`` again for every rank's sum) and for the output, and float32's own rounding.
    """
    half_ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[cfg.combine_dtype]
    roundings = 2 if cfg.reduce == "sender" else 1
    scale = roundings * plain.magnitude + np.abs(plain.out)
    # float32 matrix products add in an order that depends on how many rows there are.
    noise = 2e-5 * np.sqrt(np.mean(np.square(plain.out), dtype=np.float64))
    bound: Floats = (1.01 * half_ulp * scale + noise).astype(np.float32)
    return bound
