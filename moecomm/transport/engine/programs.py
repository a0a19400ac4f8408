"""Programs in the loop, from outside: set, told where memory is, waited for, explained."""

from __future__ import annotations

import time

from moecomm.errors import TransportError
from moecomm.transport.base import Region, RemoteRegion, check_rank
from moecomm.transport.engine import state as S
from moecomm.transport.engine.commands import Place
from moecomm.transport.engine.operations import fault
from moecomm.transport.engine.queue import OperationQueue
from moecomm.transport.engine.regions import resolve


class Programs(OperationQueue):
    """Runs functions of others' with every turn of the loop; see ``program.py``."""

    def set_program(self, function: int, state: int = 0, *, takes_arrivals: bool = False) -> None:
        """Run a program with every turn of the loop (see ``program.py``); 0: none any more.

        Args:
            function: address of an ``int64(int64)``, from ``jit.hook``; lives as long as it runs.
            state: what it is passed.
            takes_arrivals: immediates go to the program one by one (``program.next_arrival``,
                which it calls in every turn until there is none), and nobody counts them.
        """
        self._check_usable()
        with self._resources.worker.paused():
            self._memory.give_arrivals(takes_arrivals)
            self._memory.set_word(S.PROGRAM_STATE, state)
            self._memory.set_word(S.PROGRAM, function)

    @property
    def program_operations(self) -> range:
        """Numbers of the operations that a program may use; no flags, no reports."""
        return range(self._options.operations, self._memory.num_operations)

    def program_pending(self, operation: int) -> int:
        """How many writes of a program's operation are not done."""
        self._check_usable()
        return int(self._memory.operation(operation)[S.OP_PENDING // 8])

    def local_place(self, region: Region, nic: int) -> Place:
        """``region`` as a source of a program's writes by NIC ``nic``."""
        self._check_usable()
        return Place(region.address, self._regions.find(region).nics[nic].local_key)

    def remote_place(self, dst: RemoteRegion, nic: int) -> Place:
        """``dst`` as the target of a program's writes by NIC ``nic``."""
        self._check_usable()
        return Place(*resolve(dst, self.num_nics)[nic])

    def control_places(self, rank: int, nic: int) -> tuple[Place, Place]:
        """Source and target of a program's writes of nothing to ``rank`` by NIC ``nic``."""
        self._check_usable()
        check_rank(rank, self.size)
        return self._control_source(nic), self._control_target(nic, rank)

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, a channel on which nothing moves for so long is given up."""
        self._check_usable()
        self._memory.set_word(S.TIMEOUT_NS, int(timeout_s * 1e9))

    def worker_seconds(self) -> float:
        """Processor time that the worker has used; it uses all of one while it spins."""
        self._check_usable()
        return self._resources.worker.seconds()

    def explain_program(self, peer: int, code: int) -> TransportError:
        """The error of a program that found ``has_failed(peer)``, or ``fault``, to be ``code``;
        ``peer`` is this rank for the latter."""
        if peer == self.rank:
            word = self._memory.word
            return fault(self.rank, self._nics, code, word(S.FAULT_DETAIL), word(S.FAULT_NIC))
        devices = ", ".join(nic.device for nic in self._nics)
        why = "nothing moved for too long" if code < 0 else self._nics[0].explain(code, 0)
        error = TransportError(
            f"rank {self.rank}: a write to rank {peer} by {devices} ({self.transport}) failed: "
            f"{why}",
            peer=peer,
            operation="write",
            code=code if code > 0 else None,
        )
        error.transport = self.transport
        return error

    def standstill(self, limit_s: float) -> TransportError | None:
        """The error of a loop that has not turned for ``limit_s``, and nobody ended: peers will
        have missed it by then."""
        still_s = time.monotonic() - self._memory.word(S.NOW) / 1e9
        if not self.running or still_s < limit_s:
            return None
        devices = ", ".join(nic.device for nic in self._nics)
        error = TransportError(
            f"rank {self.rank}: nobody has looked after {devices} ({self.transport}) for "
            f"{still_s:.1f} s: a library call hangs, or the worker gets no processor",
            peer=self.rank,
            operation="progress",
        )
        error.transport = self.transport
        return error
