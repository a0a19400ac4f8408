"""Where every row goes, worked out over all ranks at once: the routing half of the reference.

Plain Python over plain lists. Row order falls out of visiting source groups in ascending order
and each group's tokens in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, Overflow

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """One distinct expert of a token. ``place`` is the first k that names it; ``weight`` the
    float32 sum over all that do, in order of k (``None`` without weights)."""

    place: int
    expert: int
    weight: np.float32 | None


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a source group, with its distinct experts in order of ``place``."""

    group: int
    index: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row that an expert receives."""

    token: Token
    slot: Slot


def expert_range(num_experts: int, num_ranks: int, rank: int) -> range:
    """Global ids of the experts on ``rank``: the first ``E % R`` ranks host one more."""
    sizes = [
        num_experts // num_ranks + (1 if r < num_experts % num_ranks else 0)
        for r in range(rank + 1)
    ]
    return range(sum(sizes[:rank]), sum(sizes))


class Routing:
    """Every token of every source group, and who receives it.

    Args:
        topk_idxs: a source group each, ``[T, K]`` integers, -1 = dropped.
        topk_weights: a source group each, ``[T, K]``, or ``None``.

    Raises:
        ConfigError: an expert number is out of range.
        Overflow: ``max_recv_tokens`` is too small; the same for every rank.
    """

    def __init__(
        self,
        cfg: MoeConfig,
        num_ranks: int,
        topk_idxs: Sequence[Array],
        topk_weights: Sequence[Array] | None,
    ) -> None:
        self.cfg = cfg
        self.num_ranks = num_ranks
        self.tokens = [
            [
                Token(group, t, _distinct(cfg, group, t, idx[t], _row(topk_weights, group, t)))
                for t in range(len(idx))
            ]
            for group, idx in enumerate(topk_idxs)
        ]
        self.experts = [expert_range(cfg.num_experts, num_ranks, r) for r in range(num_ranks)]
        self.owner = {e: r for r in range(num_ranks) for e in self.experts[r]}
        # Per global expert, and per rank: what it receives, in row order.
        self.arrivals: list[list[Arrival]] = [[] for _ in range(cfg.num_experts)]
        self.visitors: list[list[Token]] = [[] for _ in range(num_ranks)]
        for token in (t for group in self.tokens for t in group):
            for slot in token.slots:
                self.arrivals[slot.expert].append(Arrival(token, slot))
            for rank in sorted({self.owner[slot.expert] for slot in token.slots}):
                self.visitors[rank].append(token)
        self._check_overflow()

    def counts(self, rank: int) -> list[int]:
        """Tokens of each local expert of ``rank``."""
        return [len(self.arrivals[e]) for e in self.experts[rank]]

    def offsets(self, rank: int, capacity: int) -> list[int]:
        """First row of each local expert and the end, ``[L+1]``. ``capacity``: of an expert."""
        offsets = [0]
        for count in self.counts(rank):
            rows = capacity if self.cfg.layout == "batched" else self._aligned(count)
            offsets.append(offsets[-1] + rows)
        return offsets

    def num_rows(self, rank: int) -> int:
        """Rows in use on ``rank``, pad rows of the ``grouped`` layout included."""
        if self.cfg.layout == "rank":
            return len(self.visitors[rank])
        if self.cfg.layout == "batched":
            return sum(self.counts(rank))
        return sum(self._aligned(count) for count in self.counts(rank))

    def local_slots(self, token: Token, rank: int) -> list[Slot]:
        """A token's slots whose experts are on ``rank``, in order of ``place``."""
        return [slot for slot in token.slots if slot.expert in self.experts[rank]]

    def placed(self, rank: int, capacity: int) -> list[tuple[int, Token, list[Slot]]]:
        """Row number, token and the slots that the row stands for, of every row of ``rank``."""
        if self.cfg.layout == "rank":
            visitors = enumerate(self.visitors[rank])
            return [(row, token, self.local_slots(token, rank)) for row, token in visitors]
        return [
            (first + place, arrival.token, [arrival.slot])
            for first, expert in zip(self.offsets(rank, capacity), self.experts[rank], strict=False)
            for place, arrival in enumerate(self.arrivals[expert])
        ]

    def _aligned(self, count: int) -> int:
        alignment = self.cfg.expert_alignment
        return (count + alignment - 1) // alignment * alignment

    def _check_overflow(self) -> None:
        capacity = self.cfg.max_recv_tokens
        if capacity is None:
            return
        if self.cfg.layout == "batched":
            needs, where = [len(rows) for rows in self.arrivals], "expert"
        else:
            needs, where = [self.num_rows(r) for r in range(self.num_ranks)], "rank"
        for number, needed in enumerate(needs):
            if needed > capacity:
                raise Overflow(number, needed, capacity, where=where)


def _row(topk_weights: Sequence[Array] | None, group: int, token: int) -> Array | None:
    return None if topk_weights is None else topk_weights[group][token].astype(np.float32)


def _distinct(
    cfg: MoeConfig, group: int, token: int, idx: Array, weights: Array | None
) -> tuple[Slot, ...]:
    found: dict[int, Slot] = {}
    for k, expert in enumerate(int(e) for e in idx):
        if expert == -1:
            continue
        if not 0 <= expert < cfg.num_experts:
            raise ConfigError(
                f"topk_idx[{token}, {k}]={expert} in source group {group}: must be -1 or from 0 "
                f"to num_experts-1={cfg.num_experts - 1}"
            )
        weight = None if weights is None else weights[k]
        if expert in found:
            first = found[expert]
            if weight is not None:
                weight = np.float32(first.weight + weight)
            found[expert] = Slot(first.place, expert, weight)
        else:
            found[expert] = Slot(k, expert, weight)
    return tuple(found.values())
