"""Immediates through shared memory: one ring per (sender, receiver), each with one writer.

The receiver's memory holds, for every sender, ``consumed`` (written by the receiver) and
``NUM_SLOTS`` slots of two 64-bit words (written by the sender): ``id << 32 | imm``, then the
slot's position in the endless sequence plus one. The second word makes the slot valid; it grows
for ever, so that nothing has to be reset and an old slot cannot be taken for a new one.
"""

from __future__ import annotations

import threading
from typing import Final

NUM_SLOTS: Final = 1024
_SLOT0: Final = 8  # words; keeps the two writers of a ring on different cache lines
_RING_WORDS: Final = _SLOT0 + 2 * NUM_SLOTS
RING_BYTES: Final = 8 * _RING_WORDS

_fence_lock = threading.Lock()


class Outbox:
    """This rank's ring in the memory of a peer."""

    def __init__(self, peer_memory: memoryview, rank: int) -> None:
        self._words = _ring(peer_memory, rank)
        self._produced = 0

    def push(self, imm: int, message_id: int) -> bool:
        """Publish ``imm``, after everything that this thread has stored before; ``False``: full."""
        if self._produced - self._words[0] >= NUM_SLOTS:
            return False
        at = _SLOT0 + 2 * (self._produced % NUM_SLOTS)
        self._words[at] = (message_id & 0xFFFFFFFF) << 32 | imm
        fence()
        self._produced += 1
        self._words[at + 1] = self._produced
        return True


class Inbox:
    """The ring in this rank's memory that one peer fills."""

    def __init__(self, own_memory: memoryview, sender: int) -> None:
        self._words = _ring(own_memory, sender)
        self._consumed = 0
        self._next_id = 0
        self._ahead: set[int] = set()  # ids beyond _next_id that have come

    def take(self) -> list[int]:
        """The immediates that have come, each message once however often it was delivered."""
        taken: list[int] = []
        while True:
            at = _SLOT0 + 2 * (self._consumed % NUM_SLOTS)
            if self._words[at + 1] != self._consumed + 1:
                return taken
            fence()
            word = self._words[at]
            self._consumed += 1
            self._words[0] = self._consumed
            if self._is_new(word >> 32):
                taken.append(word & 0xFFFFFFFF)

    def _is_new(self, low_id: int) -> bool:
        distance = (low_id - self._next_id) & 0xFFFFFFFF
        if distance >= 1 << 31 or self._next_id + distance in self._ahead:
            return False
        self._ahead.add(self._next_id + distance)
        while self._next_id in self._ahead:
            self._ahead.discard(self._next_id)
            self._next_id += 1
        return True


def fence() -> None:
    """Keep the memory accesses before it before those after it, on processors that reorder.

    Taking a lock keeps later accesses from moving up, releasing it earlier ones from moving down;
    the second round keeps those two from meeting in the middle.
    """
    for _ in range(2):
        with _fence_lock:
            pass


def _ring(memory: memoryview, index: int) -> memoryview:
    return memory[index * RING_BYTES : (index + 1) * RING_BYTES].cast("Q")
