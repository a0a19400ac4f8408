"""What crosses between ranks, counted from the routing: copies per rank, and per expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moecomm.layout import Layout

if TYPE_CHECKING:
    from moecomm.demo.layer import Problem
    from moecomm.demo.router import Routing

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows between ranks, [R, R] int64, source by destination: ``per_rank`` has one for each
    (token, rank that hosts any of its experts), ``per_expert`` one for each (token, expert).
    ``load`` [E] int64: tokens of each expert. Diagonals stay on their rank."""

    per_rank: Counts
    per_expert: Counts
    load: Counts


def count_traffic(problem: Problem, routing: Routing) -> Traffic:
    """Count the rows that the whole text needs. Routing of all tokens, experts distinct."""
    cfg, num_ranks = problem.cfg, problem.num_ranks
    layout = Layout(cfg, num_ranks, 0)
    owner = np.empty(cfg.num_experts, np.int64)
    for rank in range(num_ranks):
        owner[list(layout.expert_range(rank))] = rank
    per_rank = np.zeros((num_ranks, num_ranks), np.int64)
    per_expert = np.zeros((num_ranks, num_ranks), np.int64)
    for rank in range(num_ranks):
        share = problem.share(rank)
        places = owner[routing.topk_idx[share.start : share.stop]]  # [T, K] rank of each slot
        for peer in range(num_ranks):
            hits: npt.NDArray[Any] = places == peer
            per_rank[rank, peer] = hits.any(axis=1).sum()
            per_expert[rank, peer] = hits.sum()
    load = np.bincount(routing.topk_idx.ravel(), minlength=cfg.num_experts)
    return Traffic(per_rank, per_expert, load)


def crossing(rows: Counts) -> int:
    """Rows that leave their rank."""
    return int(rows.sum() - np.trace(rows))
