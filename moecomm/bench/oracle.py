"""What one rank must receive and get back, worked out for whole tensors at once, bit for bit."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from moecomm.bench.inputs import Inputs, expand, expert_output
from moecomm.handle import Received
from moecomm.layout import Layout


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that this rank receives, in their order.

    Attributes:
        place: row number in ``recv.x`` seen as ``[rows, H]``.
        source, token: where each comes from.
        expert: local expert of each; ``None`` in the ``rank`` layout.
        counts: tokens of each local expert.
    """

    place: Any
    source: Any
    token: Any
    expert: Any
    counts: Any


class Oracle:
    """The truth about one exchange on ``layout.rank``; ``inputs`` are all ranks'."""

    def __init__(self, layout: Layout, inputs: Inputs) -> None:
        self._torch = importlib.import_module("torch")
        self._layout = layout
        self._cfg = layout.cfg
        self._inputs = inputs
        self._dtype = getattr(self._torch, layout.cfg.combine_dtype)
        self._here = layout.expert_range(layout.rank)
        owners = [layout.expert_range(r) for r in range(layout.num_ranks)]
        ends = self._torch.tensor([e.stop for e in owners], device=inputs.idx.device)
        self._owner = self._torch.bucketize(inputs.idx, ends, right=True)  # [R, T, K]
        self.rows = self._rows()

    # ---- dispatch --------------------------------------------------------------------------

    def faults(self, recv: Received) -> list[str]:
        """What is wrong with what was received; empty when nothing is."""
        rows, inputs = self.rows, self._inputs
        total = len(rows.place) if self._cfg.layout != "grouped" else self._grouped_rows()
        wanted: dict[str, tuple[Any, Any]] = {
            "counts": (recv.counts, rows.counts.int()),
            "num_rows": (recv.num_rows, self._like(rows.counts, [total])),
            "x": (self._flat(recv.x), inputs.wire[rows.source, rows.token]),
            "src_rank": (self._flat(recv.src_rank, 0), rows.source.int()),
            "src_token": (self._flat(recv.src_token, 0), rows.token.int()),
        }
        if inputs.scale is not None:
            scale = inputs.scale[rows.source, rows.token]
            wanted["x_scale"] = self._flat(recv.x_scale), scale
        if self._cfg.layout == "rank":
            local, weights = self._routing()
            wanted["topk_idx"] = self._flat(recv.topk_idx), local.int()
            wanted["topk_weights"] = self._flat(recv.topk_weights), weights
        whole = ("counts", "num_rows")
        return [
            f"rank {self._layout.rank}: {name} differs"
            for name, (have, want) in wanted.items()
            if not self._same(have if name in whole else self._pick(have), want)
        ]

    def expert_outputs(self, recv: Received) -> Any:
        """``y`` as the experts would make it of what was received; other rows are NaN."""
        block, rows = self._cfg.scale_block, self.rows
        scale = None if recv.x_scale is None else self._pick(self._flat(recv.x_scale))
        values = expand(self._pick(self._flat(recv.x)), scale, block)
        if rows.expert is None:
            local, weights = self._routing()
            made = self._weighted(values, local + self._here.start, weights, local >= 0)
        else:
            made = expert_output(values, rows.expert + self._here.start, self._dtype)
        y = self._torch.empty(recv.x.shape, dtype=self._dtype, device=values.device)
        flat = y.view(-1, self._cfg.hidden)
        flat.fill_(float("nan"))
        flat[rows.place] = made.to(self._dtype)
        return y

    # ---- combine -----------------------------------------------------------------------------

    def output(self) -> Any:
        """``[T, H]`` that this rank's tokens must get back."""
        me, cfg, inputs = self._layout.rank, self._cfg, self._inputs
        scale = None if inputs.scale is None else inputs.scale[me]
        values = expand(inputs.wire[me], scale, cfg.scale_block)
        idx, weights, owner = inputs.idx[me], inputs.weights[me], self._owner[me]
        if not self._layout.rows_per_rank:
            everywhere = self._torch.ones_like(idx, dtype=self._torch.bool)
            return self._weighted(values, idx, weights, everywhere).to(self._dtype)
        total = self._torch.zeros_like(values)
        for rank in range(self._layout.num_ranks):
            part = self._weighted(values, idx, weights, owner == rank)
            total += part.to(self._dtype).float()
        return total.to(self._dtype)

    # ---- inside --------------------------------------------------------------------------------

    def _rows(self) -> Rows:
        torch, layout, cfg = self._torch, self._layout, self._cfg
        mine = self._owner == layout.rank
        num_local = len(self._here)
        local = (self._inputs.idx - self._here.start)[mine]
        counts = torch.bincount(local, minlength=num_local)
        if cfg.layout == "rank":
            source, token = mine.any(-1).nonzero(as_tuple=True)
            place = torch.arange(len(source), device=source.device)
            return Rows(place, source, token, None, counts)
        source, token, _ = mine.nonzero(as_tuple=True)
        order = torch.sort(local, stable=True).indices  # by expert; inside, by source and token
        expert = local[order]
        first = torch.cumsum(counts, 0) - counts
        inside = torch.arange(len(order), device=order.device) - first[expert]
        place = self._starts(counts)[expert] + inside
        return Rows(place, source[order], token[order], expert, counts)

    def _starts(self, counts: Any) -> Any:
        """First row of each local expert."""
        if self._cfg.layout == "batched":
            steps = self._torch.arange(len(counts), device=counts.device)
            return steps * self._layout.expert_capacity
        padded = self._padded(counts)
        return self._torch.cumsum(padded, 0) - padded

    def _padded(self, counts: Any) -> Any:
        align = self._cfg.expert_alignment
        return (counts + align - 1) // align * align

    def _grouped_rows(self) -> int:
        return int(self._padded(self.rows.counts).sum())

    def _routing(self) -> tuple[Any, Any]:
        """``rank`` layout: local experts ``[N, K]`` (-1: elsewhere) and their weights."""
        rows, inputs = self.rows, self._inputs
        here = self._owner[rows.source, rows.token] == self._layout.rank
        local = inputs.idx[rows.source, rows.token] - self._here.start
        weights = inputs.weights[rows.source, rows.token]
        return local.where(here, local.new_tensor(-1)), weights * here

    def _weighted(self, values: Any, expert: Any, weights: Any, where: Any) -> Any:
        """Sum over slots in order, in float32, multiplication and addition rounded apart."""
        total = self._torch.zeros_like(values)
        for k in range(self._cfg.top_k):
            made = expert_output(values, expert[:, k], self._dtype).float()
            product = weights[:, k, None] * made
            total = self._torch.where(where[:, k, None], total + product, total)
        return total

    def _flat(self, array: Any, inner: int = 1) -> Any:
        """``[rows, ...]`` of what is one or two dimensions of rows."""
        return array.flatten(0, array.dim() - 1 - inner)

    def _pick(self, array: Any) -> Any:
        """The rows that mean something; by their bits, since not every type can be indexed."""
        return self._bits(array)[self.rows.place].view(array.dtype)

    def _same(self, have: Any, want: Any) -> bool:
        equal = have.dtype == want.dtype and have.shape == want.shape
        return equal and bool(self._torch.equal(self._bits(have), self._bits(want)))

    def _bits(self, array: Any) -> Any:
        torch = self._torch
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return array.contiguous().view(words[array.element_size()])

    def _like(self, array: Any, values: list[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32, device=array.device)


def differs(have: Any, want: Any) -> bool:
    """Whether two tensors of one type differ in any bit."""
    torch = importlib.import_module("torch")
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[have.element_size()]
    return not torch.equal(have.view(words), want.view(words))
