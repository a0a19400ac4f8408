"""Which handles are open: each owns one of the ``in_flight`` slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moecomm.arrays import Kind
from moecomm.errors import StateError
from moecomm.handle import Handle, State

if TYPE_CHECKING:
    from moecomm.comm import MoeComm


class Slots:
    """The handles of one communicator that are open, by slot.

    All ranks open and free handles in one order, so that all find the same lowest free slot.
    """

    def __init__(self, in_flight: int) -> None:
        self._handles: list[Handle | None] = [None] * in_flight
        self.serial = 0  # of the next handle

    def open(self, comm: MoeComm, num_rows: int, kind: Kind, weights_given: bool) -> Handle:
        """A handle in the lowest free slot. Raise ``StateError`` if none is."""
        try:
            slot = self._handles.index(None)
        except ValueError:
            raise StateError(
                f"dispatch_send: in_flight={len(self._handles)} handles are open; combine or close "
                "one first, or raise in_flight on every rank"
            ) from None
        handle = Handle(comm, slot, self.serial, num_rows, kind, weights_given)
        self._handles[slot] = handle
        self.serial += 1
        return handle

    def holder(self, slot: int) -> Handle | None:
        return self._handles[slot]

    def free(self, handle: Handle, state: State) -> None:
        """Leave ``handle`` at ``state``; its slot may be taken again."""
        handle.state = state
        if self._handles[handle.slot] is handle:
            self._handles[handle.slot] = None

    def close(self) -> None:
        for handle in self._handles:
            if handle is not None:
                self.free(handle, State.CLOSED)
