"""What lives between the halves: ``Handle``, one exchange under way, and ``Received``, its rows."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moecomm.arrays import Kind
from moecomm.errors import StateError

if TYPE_CHECKING:
    from moecomm.comm import MoeComm


class State(enum.Enum):
    """Where a handle stands; each half moves it on by one."""

    SENT = "dispatch_send was called"
    RECEIVED = "dispatch_recv was called"
    RETURNED = "combine_send was called"
    CLOSED = "it is closed"
    FAILED = "it failed"


class Handle:
    """One dispatch under way; carries its routing. Made by ``dispatch_send``.

    It holds one of the ``in_flight`` slots until ``combine_recv`` or ``close``. Every rank must
    open, combine and close its handles in the same order, since that is how ranks agree on slots.
    """

    __slots__ = (
        "__weakref__", "comm", "kind", "num_rows", "serial", "slot", "state", "weights_given"
    )  # fmt: skip

    def __init__(
        self, comm: MoeComm, slot: int, serial: int, num_rows: int, kind: Kind, weights_given: bool
    ) -> None:
        self.comm = comm
        self.slot = slot
        self.serial = serial
        self.num_rows = num_rows
        self.kind: Kind = kind
        self.weights_given = weights_given
        self.state = State.SENT

    def __repr__(self) -> str:
        return f"<Handle {self.serial} slot {self.slot}: {self.state.value}>"

    def expect(self, comm: MoeComm, state: State, call: str) -> None:
        """Raise ``StateError`` unless this handle is ``comm``'s and stands at ``state``."""
        if self.comm is not comm:
            raise StateError(f"{call}: {self!r} belongs to another MoeComm")
        if self.state is not state:
            raise StateError(
                f"{call}: must come when {state.value}; of this handle, {self.state.value}"
            )

    def close(self, stream: Any = None) -> None:
        """Give the slot back without combining. Idempotent. Every rank must do the same.

        ``stream``: as of the halves.
        """
        self.comm.release(self, stream)


@dataclass(slots=True)  # frozen would cost 1 µs a dispatch
class Received:
    """Rows that arrived for this rank's experts. Arrays are of the caller's kind.

    They lie in the communicator's memory and hold until the handle is combined or closed. Rows
    past the counts are undefined. C: rows an expert has room for, N: rows this rank has room for.

    Attributes:
        handle: goes to ``combine_send``.
        x: ``batched`` [L, C, H]; ``grouped`` and ``rank`` [N, H]; ``dispatch_dtype``, or what
            the codec makes.
        x_scale: float32, ``x``'s shape with S in place of H; ``None`` without scales.
        counts: int32 [L], tokens of each local expert.
        offsets: int32 [L+1], first row of each local expert; ``None`` for ``rank``.
        num_rows: int32 [1], rows in use (``grouped``: pad rows included).
        src_rank: int32, one a row: source group (with ``replicas=1``: source rank); -1 on pads.
        src_token: int32, one a row: row number at the source; -1 on pads.
        topk_weights: float32, one a row, when weights were given to dispatch, else ``None``;
            for ``rank`` [N, K].
        topk_idx: ``rank`` only: int32 [N, K], local expert number or -1.
    """

    handle: Handle
    x: Any
    x_scale: Any | None
    counts: Any
    offsets: Any | None
    num_rows: Any
    src_rank: Any
    src_token: Any
    topk_weights: Any | None
    topk_idx: Any | None

    def trim(self) -> Received:
        """Synchronise and return exact views: ``grouped`` and ``rank`` rows cut to ``num_rows``,
        ``batched`` to the fullest expert. Not for ``combine_send``, which takes ``x``'s shape."""
        rows = int(self.num_rows[0])
        batched = self.handle.comm.config.layout == "batched"
        if batched:
            counts = np.asarray(self.counts.tolist(), dtype=np.int64)
            rows = int(counts.max(initial=0))

        def cut(array: Any | None) -> Any | None:
            if array is None:
                return None
            return array[:, :rows] if batched else array[:rows]

        return replace(
            self,
            x=cut(self.x),
            x_scale=cut(self.x_scale),
            src_rank=cut(self.src_rank),
            src_token=cut(self.src_token),
            topk_weights=cut(self.topk_weights),
            topk_idx=cut(self.topk_idx),
        )
