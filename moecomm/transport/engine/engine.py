"""``TransferEngine``: what a rank calls. The loop does the work."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, Self

from moecomm.errors import ConfigError, PeerTimeout, StateError
from moecomm.group import DEFAULT_TIMEOUT_S, Group
from moecomm.transport.base import Operation, Region, RemoteRegion, check_imm, check_rank
from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.commands import Commands, Place
from moecomm.transport.engine.messages import Messages
from moecomm.transport.engine.operations import Queued
from moecomm.transport.engine.options import EngineOptions
from moecomm.transport.engine.programs import Programs
from moecomm.transport.engine.provider import NicOpener
from moecomm.transport.engine.writes import Writes

_POLL_S: Final = 0.00002
_ANSWER_S: Final = 1.0  # the loop's, to a command; far more than it needs


class TransferEngine(Writes, Programs):
    """``Transfer`` over one or several network interfaces, by a thread of its own.

    Constructing is collective over ``group``: NICs are opened, addresses exchanged, peers made
    reachable. Every rank has as many NICs, and NIC i of one talks to NIC i of the others.

    Methods belong to one thread at a time. They wait for nobody, but for those with ``timeout_s``.
    What a call has queued needs no further call; callbacks and errors need ``progress``.

    Args:
        group: the ranks.
        openers: this rank's NICs.
        options: see ``EngineOptions``; what peers depend on must be equal on all ranks.
        cuda_device: the GPU whose memory is sent and received; ``None``: host memory alone.
        timeout_s: for collective calls.

    Raises:
        ConfigError: ranks differ in what must be equal.
        TransportUnavailable: a NIC cannot be used.
        TransportError: another rank's cannot, or a peer cannot be reached.
        PeerTimeout: a rank did not come.
    """

    def __init__(
        self,
        group: Group,
        openers: Sequence[NicOpener],
        *,
        options: EngineOptions | None = None,
        cuda_device: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(group, openers, options or EngineOptions(), cuda_device, timeout_s)
        options = self._options
        self._expected: dict[int, Queued] = {}
        self._next_nic = self.rank
        self._messages = Messages(
            self._memory, self.rank, self.size, options.message_bytes,
            options.messages_per_peer, self._send_message, self._tell_taken,
        )  # fmt: skip

    def exchange(self, region: Region) -> list[RemoteRegion]:
        """Everybody's ``region``, by rank, registered where it is not yet. Collective.

        Raises: as ``register``; ``PeerTimeout``: a rank did not come.
        """
        mine = self.register(region).to_bytes()
        told = self._group.all_gather(mine, self._timeout_s, "exchange")
        return [RemoteRegion.from_bytes(blob) for blob in told]

    # ---- Arrivals -------------------------------------------------------------------------------

    def expect(
        self,
        imm: int,
        count: int,
        notify: Callable[[], None] | None = None,
        *,
        flag: int = 0,
        value: int = 1,
    ) -> Operation:
        """See ``Transfer.expect``.

        Args:
            flag: address of a 64-bit word, such as ``HostFlag.address``, where the worker itself
                stores ``value``, before anything here is called: a GPU may wait for it.
        """
        self._check_usable()
        check_imm(imm)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"count={count!r}: must be an integer from 1")
        if imm in self._expected:
            raise StateError(f"imm={imm}: is expected already; one expectation at a time")

        def came() -> None:
            del self._expected[imm]  # before notify, which may expect it again
            if notify is not None:
                notify()

        operation = Queued("expect", 1, 0, came)
        self._expected[imm] = operation
        commands = Commands(operation, flag, value)
        commands.add(S.EXPECT, self.rank, 0, imm, Place(0, 0), count, Place(0, 0))
        return self._queue(commands)

    def arrived(self, imm: int) -> int:
        """How often ``imm`` has come beyond what expectations have used up."""
        self._check_usable()
        check_imm(imm)
        return self._memory.arrived(imm)

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Progress until the operation is done.

        Raises:
            TransportError: it failed, or something else did meanwhile.
            PeerTimeout: it is not done in ``timeout_s`` (``None``: the engine's).
        """
        limit = self._options.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while not operation.done:
            if self.progress() == 0:
                if time.monotonic() > deadline:
                    what = operation.what if isinstance(operation, Queued) else "write"
                    raise self._named(PeerTimeout(what, -1, 1, 0, rank=self.rank))
                time.sleep(_POLL_S)
        if operation.error is not None:
            if operation.error in self._errors:
                self._errors.remove(operation.error)
            raise operation.error

    def wait_imm(
        self, imm: int, count: int = 1, timeout_s: float | None = None, peer: int = -1
    ) -> None:
        """Wait until ``imm`` has come ``count`` times, and use them up.

        Args:
            peer: for the error: whom they are expected from, where that is one rank.

        Raises:
            PeerTimeout: they have not come in ``timeout_s``; none of them is used up.
            TransportError: something failed meanwhile.
        """
        operation = self.expect(imm, count)
        assert isinstance(operation, Queued)
        try:
            self.wait(operation, timeout_s)
        except PeerTimeout as error:
            if operation.error is not None or not self._forget(imm, operation):
                raise
            late = PeerTimeout(f"imm {imm}", peer, count, self._memory.arrived(imm), rank=self.rank)
            raise self._named(late) from error

    def _forget(self, imm: int, operation: Queued) -> bool:
        """Take an expectation back; whether that was in time."""
        self._take_back(operation, imm)
        deadline = time.monotonic() + _ANSWER_S
        while not operation.done and not operation.forgotten and time.monotonic() < deadline:
            self._submit_backlog()
            self._collect()
            time.sleep(_POLL_S)
        if not operation.done:
            del self._expected[imm]
        return not operation.done

    # ---- Messages -------------------------------------------------------------------------------

    def send(self, rank: int, data: bytes, sent: Callable[[], None] | None = None) -> Operation:
        """Send a message of up to ``EngineOptions.message_bytes``; ``data`` is copied."""
        self._check_usable()
        check_rank(rank, self.size)
        return self._messages.send(rank, data, sent)

    def receive(self, timeout_s: float = 0.0) -> tuple[int, bytes] | None:
        """The next message, behind the rank that sent it; ``None`` when none comes in time.

        Messages of one rank may come in another order than they were sent.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            moved = self.progress()
            message = self._messages.receive()
            if message is not None or time.monotonic() >= deadline:
                return message
            if moved == 0:
                time.sleep(_POLL_S)

    def progress(self) -> int:
        """See ``OperationQueue.progress``; sends messages that waited for a place, too."""
        self._check_usable()
        return self._messages.progress() + super().progress()

    @property
    def outstanding(self) -> int:
        """See ``Transfer.outstanding``; messages count, too."""
        return super().outstanding + self._messages.waiting

    # ---- Ends -----------------------------------------------------------------------------------

    def abort(self, code: int = 1) -> Operation:
        """Tell all peers that this rank has given up: their ``progress`` raises. Does not wait.

        Args:
            code: not 0; what they are told.
        """
        self._check_usable()
        if isinstance(code, bool) or not isinstance(code, int) or not 0 < code < 1 << 31:
            raise ConfigError(f"code={code!r}: must be an integer from 1 to 2^31 - 1")
        commands = Commands(Queued("abort", 0, 0))
        for peer in range(self.size):
            if peer != self.rank:
                self._write_word(commands, peer, S.ROW_MY_ABORT, S.ROW_ABORT, code, S.ANYWAY)
        return self._queue(commands)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Inside ---------------------------------------------------------------------------------

    def _write_word(
        self,
        commands: Commands,
        peer: int,
        source: int,
        target: int,
        value: int,
        flags: int = 0,
    ) -> None:
        """Append a write of one word of the control row for ``peer``, by NIC 0."""
        offset = self._memory.row(0, peer) + source
        struct.pack_into("<q", self._memory.control.bytes, offset, value)
        local = Place(self._memory.control.address + offset, self._control.nics[0].local_key)
        remote = self._control_target(0, peer)
        remote = Place(remote.address + target, remote.key)
        commands.add(R.WRITE, peer, 0, None, local, 8, remote, flags)

    def _send_message(self, operation: Queued, peer: int, offset: int, nbytes: int) -> None:
        commands = Commands(operation)
        address = self._memory.control.address + offset
        local = Place(address, self._control.nics[0].local_key)
        commands.add(R.SEND, peer, 0, None, local, nbytes, Place(0, 0))
        self._queue(commands)

    def _tell_taken(self, peer: int, count: int) -> None:
        commands = Commands(Queued("receive", 0, 0))
        self._write_word(commands, peer, S.ROW_MY_MESSAGES, S.ROW_MESSAGES, count)
        self._queue(commands)
