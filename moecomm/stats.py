"""Counters that kernels keep, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm.kernels.args import PHASES
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since construction. Lists count ranks, or source groups where said.

    Attributes:
        dispatch_tokens: records sent to each rank (all replicas of this group together).
        dispatch_bytes: bytes those records took on the wire, scales and routing included.
        recv_tokens: records received from each source group.
        combine_rows: rows sent back to each source group.
        combine_bytes: bytes those rows took on the wire (with ``replicas``, every copy).
        expert_tokens: tokens that each local expert received.
        wait_s: phase → seconds that this rank's threads waited for each peer, added up.
    """

    dispatch_tokens: list[int]
    dispatch_bytes: list[int]
    recv_tokens: list[int]
    combine_rows: list[int]
    combine_bytes: list[int]
    expert_tokens: list[int]
    wait_s: dict[str, list[float]]


def read_stats(layout: Layout, run: Runtime) -> Stats:
    sent = run.read_words("stat_sent")
    rows = run.read_words("stat_rows")
    waits = run.read_words("stat_wait_ns")
    num = layout.num_ranks
    return Stats(
        dispatch_tokens=sent,
        dispatch_bytes=[n * layout.record_bytes for n in sent],
        recv_tokens=run.read_words("stat_recv"),
        combine_rows=rows,
        combine_bytes=[n * layout.combine_stride * layout.cfg.replicas for n in rows],
        expert_tokens=run.read_words("stat_expert")[: layout.num_local_experts],
        wait_s={
            phase: [ns / 1e9 for ns in waits[i * num : (i + 1) * num]]
            for i, phase in enumerate(PHASES)
        },
    )
