"""Groups of some of the ranks, and one after the other; see docs/reports.md, rows D."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange import make_case, run_case
from schedules import dispatch_arguments
from threads import run_threads

import moecomm as mc

pytestmark = pytest.mark.usefixtures("poisoned")


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 4, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


def test_d13_a_smaller_group_after_a_larger_one() -> None:
    mc.run(_sizes, 3, timeout_s=60)


def _sizes(group: mc.Group) -> None:
    for size in (3, 2, 1, 3):
        members = group.subgroup(range(size))
        if members is None:
            continue
        with members, mc.MoeComm(config(), members) as comm:
            assert comm.group.size == size
            run_case(comm, make_case(config(), size, size))


def test_d15_a_group_of_some_then_of_all() -> None:
    run_threads(_some_then_all, 3)


def _some_then_all(group: mc.Group) -> None:
    for _ in range(3):
        some = group.subgroup([0, 1])
        if some is not None:
            with mc.MoeComm(config(), some) as comm:
                run_case(comm, make_case(config(), 2))
        everybody = group.subgroup([0, 1, 2])
        assert everybody is not None
        with mc.MoeComm(config(), everybody) as comm:
            run_case(comm, make_case(config(), 3))


MESHES = (
    [[1, 0], [3, 2]],
    [[0, 2], [1, 3]],  # data parallel × expert parallel
    [[3, 1, 0]],
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_d16_ranks_are_the_groups_own(mesh: list[list[int]]) -> None:
    """Order and numbers of the expert-parallel group, never those of the world."""
    run_threads(_mesh, 4, mesh)


def _mesh(group: mc.Group, mesh: list[list[int]]) -> None:
    for members in mesh:
        own = group.subgroup(members)
        if own is None:
            continue
        assert own.rank == members.index(group.rank)
        case = make_case(config(), len(members), members[0], tokens=(4,) * len(members))
        with mc.MoeComm(config(), own) as comm:
            for _ in range(3):
                run_case(comm, case)
            recv = comm.dispatch(*dispatch_arguments(case, own.rank))
            used = np.arange(recv.src_rank.shape[1]) < recv.counts[:, None]
            assert set(recv.src_rank[used].tolist()) <= set(range(len(members)))
            own.barrier(20)
    group.barrier(20)
