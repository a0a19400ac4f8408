"""Operations: slots in the loop's table, and what to tell the caller of how they ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moecomm.errors import PeerTimeout, TransportError
from moecomm.transport.base import Operation
from moecomm.transport.engine import state as S
from moecomm.transport.engine.build import Memory
from moecomm.transport.engine.provider import Nic

_REASONS: Final = {
    S.TWICE: "it reported the completion of post {detail} twice, or of one that was never made",
    S.NO_MEMORY: "there is no memory left for counters of immediates",
    S.NIC_BROKEN: "its completion queue failed: {text}",
    S.PROGRAM_FAILED: "the program failed with {detail}",
    S.MESSAGE_OVERRUN: "a message of {detail} bytes came that there is no room for",
    S.INBOX_OVERRUN: "the program did not take the immediates that came",
}


class Queued(Operation):
    """An operation of the engine.

    Args:
        what: for messages: ``"write"``, ``"scatter"``, ``"barrier"``, ``"send"``, ``"expect"``.
        posts: how many commands it has.
        nbytes: in all of them.
    """

    __slots__ = ("forgotten", "nbytes", "posts", "slot", "what")

    def __init__(
        self, what: str, posts: int, nbytes: int, sent: Callable[[], None] | None = None
    ) -> None:
        super().__init__(1, sent)
        self.what = what
        self.posts = posts
        self.nbytes = nbytes
        self.slot = -1  # none yet
        self.forgotten = False  # an expectation that was taken back


class Slots:
    """The part of the table of operations that Python uses."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._free = list(range(count - 1, -1, -1))
        self._open: dict[int, Queued] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open(self) -> list[Queued]:
        """Operations that are not done."""
        return list(self._open.values())

    def has_room(self) -> bool:
        """Whether there is a free slot."""
        return bool(self._free)

    def begin(self, operation: Queued, flag: int = 0, value: int = 0) -> int:
        """Give the operation a slot; which."""
        slot = self._free.pop()
        record = self._memory.operation(slot)
        for offset, word in (
            (S.OP_CODE, 0), (S.OP_DETAIL, 0), (S.OP_FLAG, flag), (S.OP_VALUE, value),
            (S.OP_REPORT, 1), (S.OP_PENDING, operation.posts),
        ):  # fmt: skip
            record[offset // 8] = word
        operation.slot = slot
        self._open[slot] = operation
        return slot

    def end(self, slot: int) -> tuple[Queued, int, int, int, int]:
        """Take the slot back; its operation, and code, detail, peer and NIC of its failure."""
        record = self._memory.operation(slot)
        self._free.append(slot)
        operation = self._open.pop(slot)
        code, detail, peer, nic = (
            record[offset // 8] for offset in (S.OP_CODE, S.OP_DETAIL, S.OP_PEER, S.OP_NIC)
        )
        return operation, code, detail, peer, nic


def failure(
    rank: int, nics: tuple[Nic, ...], operation: Queued, code: int, detail: int, peer: int, nic: int
) -> TransportError:
    """The error of an operation whose record holds these numbers."""
    device = nics[nic]
    error: TransportError
    if code == S.TIMED_OUT:
        error = PeerTimeout(operation.what, peer, operation.posts, 0, rank=rank)
    else:
        if code == S.PEER_FAILED:
            earlier = "nothing moved for too long"
            if detail > 0:
                earlier = device.explain(detail, 0)
            why = f"an earlier write to it failed: {earlier}"
        elif code == S.CLOSED:
            why = "the engine has ended"
        else:
            why = device.explain(code, detail)
        error = TransportError(
            f"rank {rank}: a {operation.what} of {operation.nbytes} bytes to rank {peer} by "
            f"{device.device} ({device.transport}) failed: {why}",
            peer=peer,
            operation=operation.what,
            code=code if code > 0 else None,
        )
    error.transport = device.transport
    return error


def fault(rank: int, nics: tuple[Nic, ...], code: int, detail: int, nic: int) -> TransportError:
    """The error that ended an engine."""
    device = nics[nic]
    text = device.explain(detail, 0) if code == S.NIC_BROKEN else ""
    reason = _REASONS.get(code, "error {code}").format(detail=detail, text=text, code=code)
    return TransportError(
        f"rank {rank}: {device.device} ({device.transport}) cannot go on: {reason}",
        transport=device.transport,
        operation="poll",
        code=detail if code == S.NIC_BROKEN else code,
    )
