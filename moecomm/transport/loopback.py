"""Loopback: ranks on one machine (or in one simulation) over shared memory.

``LoopbackMemory`` is what kernels of the emulator use: every peer's copy of a region is mapped
here. ``LoopbackTransfer`` is a network interface made of it: writes with immediates, a send queue
of limited depth, and ``Faults`` to make it as unpleasant as a real one.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moecomm.errors import ConfigError, TransportError
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport.base import (
    Operation,
    PeerGroup,
    Region,
    RemoteRegion,
    Write,
    check_imm,
    check_rank,
)
from moecomm.transport.counters import ArrivalCounter
from moecomm.transport.faults import Faults
from moecomm.transport.loopback_memory import LoopbackMemory
from moecomm.transport.mailbox import RING_BYTES, Inbox, Outbox

__all__ = ["Faults", "LoopbackMemory", "LoopbackTransfer", "open_memory"]


def open_memory(group: Group) -> LoopbackMemory:
    """What ``moecomm.transport.open_memory("loopback", group)`` returns."""
    return LoopbackMemory(group)


@dataclass(slots=True, eq=False)
class _Posted:
    """One write on its way."""

    write: Write
    imm: int | None
    operation: Operation
    message_id: int = 0
    due: float = 0.0
    give_up: float = 0.0
    lost: bool = False
    landed: bool = False  # the payload is there, the immediate not yet
    copies: int = 1  # of the immediate that are still to be delivered
    error: TransportError | None = None


class LoopbackTransfer(LoopbackMemory):
    """``Transfer`` over shared memory.

    Args:
        group: the ranks. Constructing is collective.
        faults: see ``Faults``.
        timeout_s: how long to wait for the others in collective calls, and for a peer that takes
            no more immediates before a write to it fails.
    """

    def __init__(
        self,
        group: Group,
        *,
        faults: Faults | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(group, timeout_s=timeout_s)
        self.faults = faults or Faults()
        self._random = random.Random(f"{self.faults.seed} {group.rank}")
        self._mail = LoopbackMemory(group, timeout_s=timeout_s)
        mail = self._mail.allocate(RING_BYTES * self.size)
        own, peers = self._mail.buffer(mail), range(self.size)
        self._outboxes = [Outbox(self._mail.buffer(mail, peer), self.rank) for peer in peers]
        self._inboxes = [Inbox(own, peer) for peer in peers]
        self._next_id = [0] * self.size
        self._counter = ArrivalCounter()
        self._waiting: deque[_Posted] = deque()
        self._flying: list[_Posted] = []
        self._empty: deque[Operation] = deque()  # of no writes: done with the next progress
        self._errors: deque[TransportError] = deque()
        self.most_in_flight = 0  # never above faults.queue_depth; tests check it

    @property
    def outstanding(self) -> int:
        """Writes whose ``src`` must still stay as it is."""
        return len(self._waiting) + len(self._flying)

    def register(self, region: Region) -> RemoteRegion:
        """See ``Transfer.register``; the region must lie in memory of ``allocate``."""
        self._check_usable()
        for index, whole in enumerate(self._mappings):
            offset = region.address - whole.address
            if offset >= 0 and offset + region.nbytes <= whole.nbytes:
                return RemoteRegion(self.rank, offset, region.nbytes, index.to_bytes(4, "big"))
        raise ConfigError(f"region={region}: must lie in memory that allocate returned")

    def peer_group(self, ranks: Sequence[int]) -> PeerGroup:
        """See ``Transfer.peer_group``."""
        self._check_usable()
        for rank in ranks:
            check_rank(rank, self.size)
        return PeerGroup(tuple(ranks))

    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Operation:
        """See ``Transfer.write``."""
        return self._submit([Write(src, dst)], imm, sent)

    def scatter(
        self,
        group: PeerGroup,
        slices: Sequence[Write],
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Operation:
        """See ``Transfer.scatter``."""
        ranks = tuple(s.dst.rank for s in slices)
        if ranks != group.ranks:
            raise ConfigError(f"slices: are for ranks {ranks}, must be for {group.ranks}")
        return self._submit(slices, imm, sent)

    def barrier(self, group: PeerGroup, imm: int) -> Operation:
        """See ``Transfer.barrier``."""
        check_imm(imm)
        nothing = Region(0, 0)
        return self._submit([Write(nothing, RemoteRegion(r, 0, 0)) for r in group.ranks], imm, None)

    def expect(self, imm: int, count: int, notify: Callable[[], None]) -> None:
        """See ``Transfer.expect``."""
        self._check_usable()
        check_imm(imm)
        self._counter.expect(imm, count, notify)

    def progress(self) -> int:
        """See ``Transfer.progress``."""
        self._check_usable()
        while self._empty:
            self._empty.popleft().piece_done()
        done = self._post() + self._deliver() + self._receive()
        done += self._counter.settle()
        if self._errors:
            raise self._errors.popleft()
        return done

    def close(self) -> None:
        """See ``Memory.close``. Writes that are still queued are not sent."""
        super().close()
        self._mail.close()
        self._waiting.clear()
        self._flying.clear()

    def _submit(
        self, writes: Sequence[Write], imm: int | None, sent: Callable[[], None] | None
    ) -> Operation:
        self._check_usable()
        if imm is not None:
            check_imm(imm)
        for write in writes:
            self._target(write.dst)
        operation = Operation(max(len(writes), 1), sent)
        if not writes:
            self._empty.append(operation)
        self._waiting += [_Posted(write, imm, operation) for write in writes]
        return operation

    def _target(self, dst: RemoteRegion) -> int:
        """Where this process stores to ``dst``; checks it."""
        check_rank(dst.rank, self.size)
        if dst.nbytes == 0:
            return 0
        index = int.from_bytes(dst.key, "big")
        if index >= len(self._mappings):
            raise ConfigError(f"dst={dst}: is not memory of this transfer")
        region = list(self._mappings)[index]
        if dst.address + dst.nbytes > region.nbytes:
            raise ConfigError(f"dst={dst}: lies outside its region of {region.nbytes} bytes")
        return self._mappings[region][dst.rank].address + dst.address

    def _post(self) -> int:
        """Move writes from the software queue to the queue of limited depth."""
        now, count = time.monotonic(), 0
        while self._waiting and len(self._flying) < self.faults.queue_depth:
            posted = self._waiting.popleft()
            peer = posted.write.dst.rank
            posted.due = now + self._random.uniform(0.0, self.faults.delay_to(peer))
            posted.give_up = now + self._timeout_s + self.faults.delay_to(peer)
            posted.lost = self._random.random() < self.faults.drop
            posted.lost |= self.rank in self.faults.dead_ranks
            posted.copies += self._random.random() < self.faults.duplicate
            if posted.imm is not None and not posted.lost:
                posted.message_id = self._next_id[peer]
                self._next_id[peer] += 1
            self._flying.append(posted)
            self.most_in_flight = max(self.most_in_flight, len(self._flying))
            count += 1
        return count

    def _deliver(self) -> int:
        now, blocked, finished = time.monotonic(), set(), []
        flying = list(self._flying)
        if self.faults.reorder:
            self._random.shuffle(flying)
        for posted in flying:
            peer = posted.write.dst.rank
            if peer in blocked:
                continue
            if posted.due <= now and self._land(posted):
                finished.append(posted)
            elif now > posted.give_up:
                self._fail(posted, "it takes no more immediates")
                finished.append(posted)
            elif not self.faults.reorder:
                blocked.add(peer)  # the later ones to this peer keep their places
        for posted in finished:
            self._flying.remove(posted)
            posted.operation.piece_done(posted.error)
        return len(finished)

    def _land(self, posted: _Posted) -> bool:
        """Deliver what can be delivered of a write; whether that was all of it."""
        write = posted.write
        if write.dst.rank in self.faults.dead_ranks:
            self._fail(posted, "it is dead")
            return True
        if posted.lost:
            posted.copies = 0
            return True
        if not posted.landed:
            ctypes.memmove(self._target(write.dst), write.src.address, write.src.nbytes)
            posted.landed = True
        if posted.imm is None:
            posted.copies = 0
        elif self._outboxes[write.dst.rank].push(posted.imm, posted.message_id):
            posted.copies -= 1
            posted.due += self._random.uniform(0.0, self.faults.delay_to(write.dst.rank))
        return posted.copies == 0

    def _fail(self, posted: _Posted, why: str) -> None:
        peer = posted.write.dst.rank
        posted.error = TransportError(
            f"rank {self.rank}: a write of {posted.write.src.nbytes} bytes to rank {peer} "
            f"failed: {why}",
            transport="loopback",
            peer=peer,
            operation="write",
        )
        self._errors.append(posted.error)

    def _receive(self) -> int:
        count = 0
        for inbox in self._inboxes:
            for imm in inbox.take():
                self._counter.arrive(imm)
                count += 1
        return count
