"""Exchanges between ranks of pretended nodes, as data: which ranks, network, configuration, and how
many steps. One set of processes tries many, one after the other: what takes time is to start."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from exchange import Case, compare_received, finish, make_case, send
from schedules import for_rank, random_schedule, walk

import moecomm as mc

BASE: dict[str, Any] = {
    "num_experts": 9, "top_k": 3, "hidden": 80, "max_tokens": 40, "timeout_s": 20.0, "in_flight": 3,
}  # fmt: skip
NUM_CASES = 8
BARRIER_S = 2000.0  # who takes no part in a trial waits here for its end


@dataclass(frozen=True)
class Trial:
    """A communicator's whole life. With ``max_recv_tokens`` one more exchange overflows, halfway.

    Args:
        ranks: the first so many of the group.
        node_size: so many ranks in a row are a node.
        steps: exchanges, in flight and out of order, some closed unfinished.
        changes: of ``BASE``.
        variables: of the environment, without ``MOECOMM_``.
        late: ranks are late at random, before one in a hundred of their calls.
    """

    ranks: int
    node_size: int
    steps: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    late: bool = False

    @property
    def cfg(self) -> mc.MoeConfig:
        return mc.MoeConfig(**{**BASE, **self.changes})

    @property
    def groups(self) -> int:
        """Source groups."""
        return self.ranks // self.cfg.replicas

    def cases(self) -> list[Case]:
        """Nothing at all, nothing from every other group, as much as possible, and anything;
        skewed and even."""
        most, groups = self.cfg.max_tokens, range(self.groups)
        tokens: list[list[int] | None] = [
            [0 for _ in groups], [most * (g % 2) for g in groups], [most for _ in groups],
        ]  # fmt: skip
        tokens += [None] * (NUM_CASES - len(tokens))
        return [
            make_case(self.cfg, self.ranks, n, tokens=given, skew=0.3 * (n % 3))
            for n, given in enumerate(tokens)
        ]

    def overflow(self) -> tuple[Case, mc.Overflow]:
        """A step in which all tokens go to the same experts, and what everybody hears of it."""
        roomy = dataclasses.replace(self.cfg, max_recv_tokens=None)
        tokens = [roomy.max_tokens] * self.groups
        case = make_case(roomy, self.ranks, 99, tokens=tokens, skew=1.0, dropped=0.0, repeated=0.0)
        weights = case.weights if case.weights_at_dispatch else None
        try:
            mc.reference.dispatch(self.cfg, self.ranks, case.xs, case.idxs, weights, case.x_scales)
        except mc.Overflow as error:
            return case, error
        raise AssertionError(f"{self}: max_recv_tokens is enough")


def try_all(
    group: mc.Group, trials: Sequence[Trial], transport: str | None = None
) -> dict[str, list[str]]:
    """One after the other; what was wrong on this rank, by trial. A rank goes on where something is
    wrong, so that its peers need not wait for it."""
    wrong: dict[str, list[str]] = {}
    for trial in trials:
        members = group.subgroup(range(trial.ranks))
        if members is not None:
            variables = {**trial.variables, "NODE_SIZE": trial.node_size, "POISON": 1}
            os.environ.update({f"MOECOMM_{name}": str(v) for name, v in variables.items()})
            try:
                with members:
                    _try(members, trial, transport, wrong.setdefault(str(trial), []))
            except Exception as error:
                error.add_note(f"in {trial}")
                raise
        group.barrier(BARRIER_S)
    return wrong


def _try(group: mc.Group, trial: Trial, transport: str | None, wrong: list[str]) -> None:
    cfg, cases = trial.cfg, trial.cases()
    common, own = np.random.default_rng(trial.steps), np.random.default_rng(group.rank)

    def pause() -> None:
        if trial.late and own.random() < 0.01:
            time.sleep(own.exponential(0.002))

    def some(steps: int) -> None:
        schedule = for_rank(random_schedule(common, steps, cfg.in_flight, closed=0.2), own)
        walk(comm, cases, schedule, pause=pause, report=wrong.append)

    with mc.MoeComm(cfg, group, transport or group.transport) as comm:
        some(trial.steps // 2)
        if cfg.max_recv_tokens is not None:
            try:
                _overflow(comm, cases[-1], *trial.overflow())
            except AssertionError as error:
                wrong.append(f"overflow: {error}")
        some(trial.steps - trial.steps // 2)


def _overflow(comm: mc.MoeComm, fits: Case, too_much: Case, expected: mc.Overflow) -> None:
    """Beside one that fits, which half of the ranks receive first."""
    rank = comm.group.rank
    good, bad = send(comm, fits), send(comm, too_much)

    def refused() -> None:
        try:
            comm.dispatch_recv(bad)
        except mc.Overflow as error:
            found = vars(error)
        else:
            found = {}
        assert found == vars(expected), found

    if rank % 2:
        refused()
    recv = comm.dispatch_recv(good)
    compare_received(fits, rank, recv)
    if rank % 2 == 0:
        refused()
    finish(comm, fits, recv)
