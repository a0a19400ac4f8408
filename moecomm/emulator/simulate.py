"""``simulate`` and ``fuzz``: run a function on all ranks of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from moecomm.emulator.faults import Faults
from moecomm.emulator.simulation import Simulation


def simulate(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    seed: int = 0,
    checks: bool | Literal["strict"] = True,
    faults: Faults | None = None,
    max_steps: int | None = None,
) -> list[Any]:
    """Return ``[fn(group, *args) for each rank's group]``, all ranks running in one simulation.

    Raises what the first failing rank raises, with a note that names the rank and the seed.
    """
    from moecomm.group import Group

    simulation = Simulation(num_ranks, seed=seed, checks=checks, faults=faults, max_steps=max_steps)

    def call(rank: int) -> Any:
        with Group(rank, num_ranks, simulation.store(rank), simulation=simulation) as group:
            return fn(group, *args)

    return simulation.run(call)


def fuzz(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    seeds: Iterable[int] = range(40),
    checks: bool | Literal["strict"] = True,
    faults: Faults | None = None,
    max_steps: int | None = None,
) -> None:
    """``simulate`` once for each seed; the first failure is raised and names its seed."""
    for seed in seeds:
        simulate(fn, num_ranks, *args, seed=seed, checks=checks, faults=faults, max_steps=max_steps)
