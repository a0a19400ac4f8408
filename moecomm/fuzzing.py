"""Random exchanges in the simulation, compared bit for bit with the reference.

A case follows from its seed (and from what the caller fixes), so a failing seed is all that is
needed to see a failure again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moecomm import reference
from moecomm.comm import MoeComm
from moecomm.config import LayoutName, MoeConfig, Reduce
from moecomm.dtypes import numpy_dtype, word_dtype
from moecomm.emulator import simulate
from moecomm.emulator.simulation import Checks
from moecomm.errors import ConfigError, MoecommError
from moecomm.group import Group
from moecomm.handle import Handle, Received

Array = npt.NDArray[Any]
LAYOUT_NAMES: Final[tuple[LayoutName, ...]] = ("batched", "grouped", "rank")
REDUCE_NAMES: Final[tuple[Reduce, ...]] = ("receiver", "sender")
MAX_STEPS: Final = 200_000_000  # thread switches of one case; a case needs a thousandth of it
PER_ROW: Final = ("x", "x_scale", "src_rank", "src_token", "topk_weights", "topk_idx")


class Mismatch(MoecommError):
    """The kernels and the reference differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ``draw_case`` may choose from. ``None``: anything."""

    ranks: int | None = None
    max_ranks: int = 5
    tokens: int = 12  # most of one rank in one step
    hidden: int = 96  # most columns
    steps: int = 3
    layout: LayoutName | None = None
    reduce: Reduce | None = None
    dtype: str | None = None  # of dispatch
    kernels: str = "auto"  # as MoeComm's

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{field.name}={value}: must be at least 1")

    def changed(self) -> dict[str, Any]:
        """Fields that are not at their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


class Inputs(NamedTuple):
    """One rank's arguments in one step: x [T, H], topk_idx [T, K], topk_weights [T, K]."""

    x: Array
    topk_idx: Array
    topk_weights: Array


@dataclass(frozen=True, slots=True)
class Case:
    """``steps`` exchanges of ``cfg`` over ``num_ranks``; weights go in at dispatch or combine."""

    seed: int
    num_ranks: int
    cfg: MoeConfig
    steps: int
    weights_at: Literal["dispatch", "combine"]
    kernels: str = "auto"

    def __str__(self) -> str:
        cfg = self.cfg
        return (
            f"{self.num_ranks} ranks, replicas={cfg.replicas}, layout={cfg.layout}, "
            f"{cfg.num_experts} experts, top_k={cfg.top_k}, hidden={cfg.hidden}, "
            f"max_tokens={cfg.max_tokens}, dispatch_dtype={cfg.dispatch_dtype}, "
            f"scale_block={cfg.scale_block}, combine_dtype={cfg.combine_dtype}, "
            f"reduce={cfg.reduce}, wire={cfg.wire}, expert_alignment={cfg.expert_alignment}, "
            f"{self.steps} steps"
        )

    def inputs(self, step: int, rank: int) -> Inputs:
        """Replicas get the same. Any number of tokens, from none to ``max_tokens``; slots may be
        dropped (their weight is then NaN, which nobody may read) or name an expert twice."""
        cfg = self.cfg
        rng = np.random.default_rng([self.seed, step, rank // cfg.replicas])
        num_tokens = int(rng.choice([0, 1, cfg.max_tokens, int(rng.integers(cfg.max_tokens + 1))]))
        idx = rng.integers(0, cfg.num_experts, (num_tokens, cfg.top_k))
        if rng.random() < 0.3:  # everybody wants the same expert
            idx[:, 0] = 0
        idx[rng.random(idx.shape) < rng.choice([0.0, 0.2, 1.0], p=[0.5, 0.4, 0.1])] = -1
        weights = np.where(idx < 0, np.nan, rng.random(idx.shape)).astype(np.float32)
        x = rng.standard_normal((num_tokens, cfg.hidden), np.float32)
        dtype = "bfloat16" if cfg.dispatch_dtype == "float8_e4m3fn" else cfg.dispatch_dtype
        return Inputs(x.astype(numpy_dtype(dtype)), idx, weights)


def draw_case(seed: int, limits: Limits) -> Case:
    """The case of ``seed`` within ``limits``."""
    rng = np.random.default_rng(seed)

    def up_to(most: int) -> int:
        return int(rng.integers(1, most + 1))

    def one_of(choices: tuple[Any, ...]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    num_ranks = limits.ranks or up_to(limits.max_ranks)
    num_experts = up_to(9)
    layout = limits.layout or one_of(LAYOUT_NAMES)
    reduce = limits.reduce or ("receiver" if layout == "rank" else one_of(REDUCE_NAMES))
    dtype = limits.dtype or one_of(("bfloat16", "bfloat16", "float8_e4m3fn"))
    hidden = up_to(limits.hidden)
    if rng.random() < 0.6:  # rows of whole 16-byte words: what the fast paths take
        hidden = max(1, hidden // 16) * 16 if limits.hidden >= 16 else hidden
    cfg = MoeConfig(
        num_experts=num_experts,
        top_k=up_to(min(num_experts, 4)),
        hidden=hidden,
        max_tokens=up_to(limits.tokens),
        dispatch_dtype=dtype,
        scale_block=one_of((None, 16, 32)) if dtype == "float8_e4m3fn" else None,
        layout=layout,
        expert_alignment=one_of((1, 4)) if layout == "grouped" else 1,
        replicas=one_of(tuple(d for d in (1, 1, 2) if num_ranks % d == 0)),
        reduce=reduce,
        in_flight=one_of((1, 2)),
        wire=one_of(("auto", "auto", "flags")),
        timeout_s=3600.0,  # of simulated time: only a wait that nothing could end reaches it
    )
    at_dispatch = cfg.weights_travel or layout == "rank" or rng.random() < 0.5
    weights_at: Literal["dispatch", "combine"] = "dispatch" if at_dispatch else "combine"
    return Case(seed, num_ranks, cfg, limits.steps, weights_at, limits.kernels)


def run_case(case: Case, checks: Checks = True) -> None:
    """Run ``case`` under the schedule of its seed; ``checks`` as ``simulate`` takes them.

    Raises:
        Mismatch: the kernels' results differ from the reference.
        MoecommError: what a rank raised, or what the emulator's checks found.
    """
    ranks = simulate(
        _run_rank, case.num_ranks, case, seed=case.seed, checks=checks, max_steps=MAX_STEPS
    )
    for step in range(case.steps):
        _compare_step(case, step, [rank[step] for rank in ranks])


class Seen(NamedTuple):
    """What a rank saw in one step: copies of the received arrays, ``y``, and the output."""

    recv: dict[str, Array | None]
    y: Array
    out: Array


def _run_rank(group: Group, case: Case) -> list[Seen]:
    """All steps; with two slots, a step is sent before the last one is finished."""
    seen: list[Seen] = []
    waiting: list[tuple[int, Handle]] = []
    with MoeComm(case.cfg, group, device="cpu", kernels=case.kernels) as comm:
        for step in range(case.steps):
            x, idx, weights = case.inputs(step, group.rank)
            given = weights if case.weights_at == "dispatch" else None
            waiting.append((step, comm.dispatch_send(x, idx, given)))
            if len(waiting) == case.cfg.in_flight:
                seen.append(_finish(comm, case, *waiting.pop(0)))
        seen += [_finish(comm, case, *entry) for entry in waiting]
    return seen


def _finish(comm: MoeComm, case: Case, step: int, handle: Handle) -> Seen:
    recv = comm.dispatch_recv(handle)
    names = (*PER_ROW, "counts", "offsets", "num_rows")
    copies = {name: _copy(getattr(recv, name)) for name in names}
    y = _experts(recv, case.cfg)
    weights = case.inputs(step, comm.group.rank).topk_weights
    out = comm.combine(y, handle, None if case.weights_at == "dispatch" else weights)
    return Seen(copies, y, out)


def _copy(array: Any | None) -> Array | None:
    return None if array is None else np.array(array)


def _experts(recv: Received, cfg: MoeConfig) -> Array:
    """Stand-in for experts: each received row, negated and scaled; other rows are NaN."""
    used = _used(cfg, recv)
    y = np.full(recv.x.shape, np.nan, np.float32)
    y[used] = -0.75 * np.nan_to_num(recv.x[used].astype(np.float32))
    return y.astype(numpy_dtype(cfg.combine_dtype))


def _used(cfg: MoeConfig, recv: Any) -> Array:
    """True for rows that mean something: [L, C] or [N]."""
    if cfg.layout == "batched":
        used: Array = np.arange(recv.x.shape[1]) < np.asarray(recv.counts)[:, None]
        return used
    return np.arange(len(recv.x)) < int(recv.num_rows[0])


def _compare_step(case: Case, step: int, seen: list[Seen]) -> None:
    cfg, num_ranks = case.cfg, case.num_ranks
    inputs = [case.inputs(step, rank) for rank in range(num_ranks)]
    xs, idxs, weights = (list(column) for column in zip(*inputs, strict=True))
    travel = weights if case.weights_at == "dispatch" else None
    recvs = reference.dispatch(cfg, num_ranks, xs, idxs, travel)
    ys = [rank.y for rank in seen]
    outs = reference.combine(cfg, num_ranks, ys, idxs, None if cfg.layout == "rank" else weights)
    for rank in range(num_ranks):
        where = f"step {step}, rank {rank}"
        used = _used(cfg, recvs[rank])
        for name, have in seen[rank].recv.items():
            want = getattr(recvs[rank], name)
            if have is not None and name in PER_ROW:
                have, want = have[used], want[used]
            _same_bits(f"{where}: {name}", have, want)
        _same_bits(f"{where}: output", seen[rank].out, outs[rank])


def _same_bits(what: str, have: Array | None, want: Array | None) -> None:
    if have is None or want is None:
        if have is not want:
            raise Mismatch(f"{what}: only one of kernels and reference has it")
        return
    if have.shape != want.shape or have.dtype != want.dtype:
        raise Mismatch(f"{what}: {have.dtype}{have.shape}, want {want.dtype}{want.shape}")
    word = word_dtype(want.dtype.name)
    differ = np.argwhere(
        np.ascontiguousarray(have).view(word) != np.ascontiguousarray(want).view(word)
    )
    if len(differ):
        first = tuple(int(i) for i in differ[0])
        raise Mismatch(
            f"{what}: {len(differ)} of {want.size} elements differ, first at {first}: "
            f"{have[first]}, want {want[first]}"
        )
