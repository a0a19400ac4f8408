"""Between calls and the loop: operations under way, their ends, and errors."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np

from moecomm.errors import TransportError
from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.commands import Commands, Place
from moecomm.transport.engine.operations import Queued, Slots, failure, fault
from moecomm.transport.engine.ring import collect, load, submit
from moecomm.transport.engine.symmetric import SymmetricMemory

_AT_ONCE: Final = 256  # commands copied, or ends collected, in one step


class OperationQueue(SymmetricMemory):
    """Operations: given to the loop in order, as far as it has room; collected when done."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots = Slots(self._memory, self._options.operations)
        self._backlog: deque[Commands] = deque()
        self._empty: deque[Queued] = deque()
        self._errors: deque[TransportError] = deque()
        self._staging = Block(_AT_ONCE * R.POST_BYTES)
        self._numbers = np.zeros(_AT_ONCE, np.uint32)
        self._reported = 0
        self._unfinished = 0
        self._fault: TransportError | None = None

    @property
    def outstanding(self) -> int:
        """Operations that are not done, expectations aside: their sources must stay."""
        return self._unfinished

    def progress(self) -> int:
        """See ``Transfer.progress``: calls ``sent`` and ``notify``, and raises what has failed.

        Raises:
            TransportError: an operation failed, the engine cannot go on, or a peer has given up.
        """
        self._check_usable()
        done = self._submit_backlog() + self._collect()
        while self._empty:
            self._end(self._empty.popleft(), None)
            done += 1
        if self._errors:
            raise self._errors.popleft()
        self.check()
        return done

    def check(self) -> None:
        """Raise what has ended the engine, or a peer that has given up; never waits.

        Raises:
            TransportError: see ``progress``.
        """
        self._check_usable()
        code = int(load(self._memory.engine + S.FAULT))
        if code != 0 and self._fault is None:
            word = self._memory.word
            self._fault = fault(
                self.rank, self._nics, code, word(S.FAULT_DETAIL), word(S.FAULT_NIC)
            )
            self._give_up(self._fault)
        if self._fault is not None:
            raise self._fault
        peer = int(load(self._memory.engine + S.ABORTED_BY)) - 1
        if peer >= 0:
            code = self._memory.word(S.ABORT_CODE)
            text = f"rank {self.rank}: rank {peer} has given up (code {code})"
            raise self._named(TransportError(text, peer=peer, operation="abort", code=code))

    # ---- Inside ---------------------------------------------------------------------------------

    def _queue(self, commands: Commands) -> Queued:
        """Give the commands of an operation to the loop, now or as soon as it has room."""
        operation = commands.operation
        operation.posts = commands.count
        if operation.what != "expect":
            self._unfinished += 1
        if commands.count == 0:
            self._empty.append(operation)
        else:
            self._backlog.append(commands)
            self._submit_backlog()
        return operation

    def _submit_backlog(self) -> int:
        taken = 0
        while self._backlog:
            commands = self._backlog[0]
            if commands.operation.slot < 0:
                if not self._slots.has_room():
                    break
                slot = self._slots.begin(commands.operation, commands.flag, commands.value)
                commands.set_context(slot)
            if not self._submit(commands):
                break
            self._backlog.popleft()
            taken += 1
        return taken

    def _submit(self, commands: Commands) -> bool:
        """Put commands into the ring; whether that was the last of them."""
        while commands.taken < commands.count:
            count = min(commands.count - commands.taken, _AT_ONCE)
            first = commands.taken * R.POST_BYTES
            nbytes = count * R.POST_BYTES
            self._staging.bytes[:nbytes] = commands.data[first : first + nbytes]
            taken = int(submit(self._memory.engine, self._staging.address, count))
            commands.taken += taken
            if taken < count:
                return False
        return True

    def _collect(self) -> int:
        """End the operations that the loop has reported."""
        address = self._numbers.ctypes.data
        count = int(collect(self._memory.engine, self._reported, address, _AT_ONCE))
        self._reported += count
        for slot in self._numbers[:count].tolist():
            operation, code, *numbers = self._slots.end(slot)
            error = None
            if code == S.FORGOTTEN:
                operation.forgotten = True
                continue
            if code != 0:
                error = failure(self.rank, self._nics, operation, code, *numbers)
                self._errors.append(error)
            self._end(operation, error)
        return count

    def _take_back(self, operation: Queued, imm: int) -> None:
        """Tell the loop, or the backlog, to forget an expectation; see ``Queued.forgotten``."""
        if operation.slot < 0:
            self._backlog = deque(c for c in self._backlog if c.operation is not operation)
            operation.forgotten = True
            return
        commands = Commands(operation)
        commands.add(S.FORGET, self.rank, 0, imm, Place(0, 0), 0, Place(0, 0))
        commands.set_context(operation.slot)
        self._backlog.append(commands)

    def _end(self, operation: Queued, error: TransportError | None) -> None:
        if operation.what != "expect":
            self._unfinished -= 1
        operation.piece_done(error)

    def _give_up(self, error: TransportError) -> None:
        """The loop has ended: so has everything that it was to do."""
        self._collect()
        for operation in self._slots.open:
            self._slots.end(operation.slot)
            self._end(operation, error)
        while self._backlog:
            self._end(self._backlog.popleft().operation, error)

    def _control_source(self, nic: int) -> Place:
        """Valid memory of this rank, for posts that carry nothing."""
        return Place(self._memory.control.address, self._control.nics[nic].local_key)

    def _control_target(self, nic: int, peer: int) -> Place:
        """Valid memory of a peer: its control row for this rank."""
        return Place(*self.control_rows[nic][peer])
