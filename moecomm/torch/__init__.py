"""Dispatch and combine as torch custom ops: for ``torch.compile``, checkpointing and training.

    from moecomm.torch import TorchOps

    ops = TorchOps(comm)                       # outside of what is compiled

    @torch.compile(fullgraph=True)
    def layer(x, topk_idx, topk_weights):
        recv = ops.dispatch(x, topk_idx)
        return ops.combine(experts(recv.x, recv.counts), recv, topk_weights)

``MoeComm`` itself is the cheaper interface where nothing is compiled or differentiated: its
``recv.x`` lies in the communicator's memory. What an op returns must be the caller's, so here it
is a copy: one read and one write of all rows there is room for, used or not, at the speed of the
device's memory (``max_recv_tokens`` makes them fewer). Rows that nobody sent are zero in it.

The ops are functions of their arguments: a compiler may drop, merge or repeat them, as
checkpointing does. Two things follow. A combine whose exchange is closed dispatches again (rows
of zeros), and an exchange that was never combined is closed when the next dispatch needs its
slot. And ranks still have to run the same ops in the same order: all of them compiled or none,
and where anything requires grad on one rank, on all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moecomm.comm import MoeComm
from moecomm.torch import ops
from moecomm.torch.exchanges import exchanges_of

__all__ = ["Dispatched", "TorchOps"]


class Dispatched(NamedTuple):
    """Rows that arrived for this rank's experts, in tensors of their own; goes to ``combine``.

    Attributes:
        x, x_scale, counts, offsets, num_rows, topk_weights, topk_idx: as in ``moecomm.Received``;
            rows that nobody sent are 0, -1 in ``topk_idx``.
        ticket: int64 [1] on the CPU; which exchange this is, of all in this process.
        sent_idx, sent_weights, num_tokens: what dispatch was given.
    """

    x: Any
    x_scale: Any | None
    counts: Any
    offsets: Any | None
    num_rows: Any
    topk_weights: Any | None
    topk_idx: Any | None
    ticket: Any
    sent_idx: Any
    sent_weights: Any | None
    num_tokens: Any | None


class TorchOps:
    """``comm``'s exchange as the ops ``torch.ops.moecomm.dispatch`` and ``combine``.

    Make it outside of compiled functions and keep it: graphs know the communicator by ``name``.
    While ops run on it, a communicator should have no handles from elsewhere.

    Gradients of ``x``, of ``y`` and of combine's weights exist for ``layout="batched"`` and
    ``"grouped"`` with ``reduce="receiver"``, ``replicas=1``, and one dtype, not fp8 and without
    codec, for both directions; those of the weights need ``hidden >= num_experts`` and are rounded
    to that dtype once. Anything else that requires grad is a ``ConfigError``. Each op's backward
    is a dispatch and a combine: a training step takes three exchanges, where one that hands
    handles from one backward to the next would take two.

    Raises, from the ops when they run: what the halves of ``MoeComm`` raise. What is found while
    torch compiles (a gradient that there is not, a communicator that is gone) it wraps in an
    error of its own.
    """

    def __init__(self, comm: MoeComm) -> None:
        self._exchanges = exchanges_of(comm)
        self.name = self._exchanges.name
        form = self._exchanges.form
        self._scaled, self._by_rank = form.num_scales > 0, form.by_rank

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        x_scale: Any = None,
        num_tokens: Any = None,
    ) -> Dispatched:
        """``MoeComm.dispatch`` of torch tensors; same arguments, same errors."""
        rows, scale, counts, offsets, num_rows, weights, idx, ticket = ops.dispatch(
            x, topk_idx, topk_weights, x_scale, num_tokens, self.name
        )
        return Dispatched(
            x=rows,
            x_scale=scale if self._scaled else None,
            counts=counts,
            offsets=None if self._by_rank else offsets,
            num_rows=num_rows,
            topk_weights=None if topk_weights is None else weights,
            topk_idx=idx if self._by_rank else None,
            ticket=ticket,
            sent_idx=topk_idx,
            sent_weights=topk_weights,
            num_tokens=num_tokens,
        )

    def combine(self, y: Any, recv: Dispatched, topk_weights: Any = None) -> Any:
        """``MoeComm.combine`` of torch tensors: a new [T, H]; same errors.

        Rows past ``num_tokens`` are 0.
        """
        return ops.combine(
            y,
            recv.ticket,
            recv.sent_idx,
            recv.sent_weights,
            topk_weights,
            recv.num_tokens,
            self.name,
        )
