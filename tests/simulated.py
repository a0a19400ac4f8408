"""Exchanges in one simulation, compared with the reference bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from exchange import Case, make_case, run_case

import moecomm as mc
from moecomm.emulator import simulate


def exchange(
    cfg: mc.MoeConfig,
    num_ranks: int,
    *,
    steps: int = 1,
    seeds: Iterable[int] = (1,),
    checks: bool | str = "strict",
    **make: Any,
) -> list[Case]:
    """Dispatch and combine ``steps`` times, under every seed's schedule; ``make`` goes to
    ``make_case``. Returns the cases."""
    cases = [make_case(cfg, num_ranks, step, **make) for step in range(steps)]
    for seed in seeds:
        simulate(run_cases, num_ranks, cases, seed=seed, checks=checks)
    return cases


def run_cases(group: mc.Group, cases: Sequence[Case]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
        group.barrier(60)
