"""Combine: the experts' outputs brought back and summed, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecomm.config import MoeConfig
from moecomm.dtypes import name_of, numpy_dtype
from moecomm.errors import ConfigError, DtypeError
from moecomm.layout import Layout
from moecomm.reference.inputs import check_shape, route
from moecomm.reference.routing import Routing, Slot, Token

Array = NDArray[Any]


def combine(
    cfg: MoeConfig,
    num_ranks: int,
    ys: Sequence[Array],
    topk_idxs: Sequence[Array],
    topk_weights: Sequence[Array] | None = None,
    *,
    outs: Sequence[Array] | None = None,
    accumulate: bool = False,
) -> list[Array]:
    """Bring the experts' outputs back and form each token's sum.

    Args:
        ys: R of the shape that ``dispatch`` gives ``x`` on that rank, ``combine_dtype``.
        topk_idxs: as given to ``dispatch``.
        topk_weights: R of ``[T, K]``, whether given to dispatch or to combine; left out in
            ``rank`` layout, where ``ys`` are weighted already.
        outs: R of ``[T, H]`` ``combine_dtype``, what ``accumulate`` adds to.

    Returns:
        R new arrays ``[T, H]`` of ``combine_dtype``.

    Raises:
        ConfigError: a shape, dtype or expert number breaks its rule, or weights are missing or
            not wanted.
        Overflow: as in ``dispatch``.
    """
    layouts = [Layout(cfg, num_ranks, rank) for rank in range(num_ranks)]
    if (topk_weights is None) != (cfg.layout == "rank"):
        rule = "must be left out" if cfg.layout == "rank" else "must be given"
        raise ConfigError(f"topk_weights: {rule} with layout={cfg.layout!r}")
    if accumulate and outs is None:
        raise ConfigError("accumulate=True, outs=None: must have outs to add to")
    routing = route(cfg, num_ranks, topk_idxs, topk_weights)
    back = _Returned(routing, layouts, ys)
    result = []
    for rank in range(num_ranks):
        tokens = routing.tokens[rank // cfg.replicas]
        out = np.zeros((len(tokens), cfg.hidden), numpy_dtype(cfg.combine_dtype))
        if accumulate and outs is not None:
            if name_of(outs[rank].dtype) != cfg.combine_dtype:
                raise DtypeError(f"out has dtype {outs[rank].dtype}: must be {cfg.combine_dtype}")
            check_shape("out", rank, outs[rank], out.shape)
            out[:] = outs[rank]
        for token in tokens:
            if token.slots:  # others stay 0, or what out had
                start = out[token.index].astype(np.float32) if accumulate else _zeros(cfg)
                with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are values
                    out[token.index] = _rounded(cfg, back.sum(token, start))
        result.append(out)
    return result


class _Returned:
    """The experts' outputs, found by token."""

    def __init__(self, routing: Routing, layouts: list[Layout], ys: Sequence[Array]) -> None:
        self.routing = routing
        self.cfg = routing.cfg
        # (group, token, rank, expert or -1 in rank layout) → row
        self.row: dict[tuple[int, int, int, int], Array] = {}
        for layout, y in zip(layouts, ys, strict=True):
            self._file(layout, np.asarray(y))

    def _file(self, layout: Layout, y: Array) -> None:
        cfg, rank = self.cfg, layout.rank
        if name_of(y.dtype) != cfg.combine_dtype:
            raise DtypeError(f"y of rank {rank} has dtype {y.dtype}: must be {cfg.combine_dtype}")
        check_shape("y", rank, y, layout.recv_shape)
        flat = y.reshape(layout.recv_rows, cfg.hidden)
        for row, token, slots in self.routing.placed(rank, layout.expert_capacity):
            for slot in slots:
                expert = -1 if cfg.layout == "rank" else slot.expert
                self.row[token.group, token.index, rank, expert] = flat[row].astype(np.float32)

    def sum(self, token: Token, start: Array) -> Array:
        """``start`` plus the token's rows, in the order that the configuration says."""
        if self.cfg.layout == "rank" or self.cfg.reduce == "sender":
            ranks = sorted({self.routing.owner[slot.expert] for slot in token.slots})
            for rank in ranks:  # those without a slot add nothing, not even +0.0
                start = start + self._partial(token, rank)
            return start
        return self._weighted(token, list(token.slots), start)

    def _partial(self, token: Token, rank: int) -> Array:
        """What one rank sends back for a token, float32."""
        if self.cfg.layout == "rank":
            return self.row[token.group, token.index, rank, -1]
        slots = self.routing.local_slots(token, rank)
        partial = self._weighted(token, slots, _zeros(self.cfg))
        return _rounded(self.cfg, partial).astype(np.float32)

    def _weighted(self, token: Token, slots: list[Slot], start: Array) -> Array:
        for slot in slots:
            rank = self.routing.owner[slot.expert]
            product = slot.weight * self.row[token.group, token.index, rank, slot.expert]
            start = start + product
        return start


def _zeros(cfg: MoeConfig) -> Array:
    return np.zeros(cfg.hidden, np.float32)


def _rounded(cfg: MoeConfig, total: Array) -> Array:
    """To ``combine_dtype``, nearest even; what is too large becomes infinite."""
    return total.astype(numpy_dtype(cfg.combine_dtype))
