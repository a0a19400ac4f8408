"""What a transport is: two protocols, and the plain values that they speak in.

``Memory`` makes peers' memory reachable; a transport whose kernels do the rest (NVLink, NVSHMEM)
is no more than that. ``Transfer`` adds one-sided writes that a host thread posts (RDMA).

Nothing is assumed about the order of writes. A write carries its payload and a 32-bit immediate,
and those two arrive together: whoever has counted the immediate may read the payload, and says
nothing about any other write. Receivers therefore count (``expect``), and never take the last
write for a sign that the earlier ones have come.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from moecomm.errors import ConfigError, StateError, TransportError

MAX_IMM: Final = (1 << 32) - 1


def check_usable(pid: int, closed: bool) -> None:
    """Raise ``StateError`` in a process forked from ``pid``, which made the memory, and once it
    is closed."""
    if os.getpid() != pid:
        raise StateError(
            f"this memory belongs to process {pid}; process {os.getpid()} was forked "
            "from it and must not use it"
        )
    if closed:
        raise StateError("the memory is closed")


def check_rank(rank: object, size: int) -> None:
    """Raise ``ConfigError`` unless ``rank`` is one of ``size``."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError(f"rank={rank!r}: must be from 0 to {size - 1}")


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` bytes at ``address`` of this process."""

    address: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Region:
        """The ``nbytes`` from ``offset``; ``ConfigError`` where they do not lie inside."""
        _check_inside(offset, nbytes, self.nbytes)
        return Region(self.address + offset, nbytes)


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """Memory of rank ``rank`` that it has registered; travels between ranks as bytes.

    ``address`` means something to that rank and its transport only. ``key`` is what the transport
    needs beside it (for RDMA, the remote keys of every NIC).
    """

    rank: int
    address: int
    nbytes: int
    key: bytes = b""

    _HEAD = struct.Struct("!IQQ")

    def part(self, offset: int, nbytes: int) -> RemoteRegion:
        """The ``nbytes`` from ``offset``; ``ConfigError`` where they do not lie inside."""
        _check_inside(offset, nbytes, self.nbytes)
        return RemoteRegion(self.rank, self.address + offset, nbytes, self.key)

    def to_bytes(self) -> bytes:
        """For ``Group.all_gather``; see ``from_bytes``."""
        return self._HEAD.pack(self.rank, self.address, self.nbytes) + self.key

    @classmethod
    def from_bytes(cls, data: bytes) -> RemoteRegion:
        """The inverse of ``to_bytes``."""
        rank, address, nbytes = cls._HEAD.unpack_from(data)
        return cls(rank, address, nbytes, data[cls._HEAD.size :])


@dataclass(frozen=True, slots=True)
class Write:
    """Copy ``src`` to ``dst``; both have the same size, which may be 0."""

    src: Region
    dst: RemoteRegion

    def __post_init__(self) -> None:
        if self.src.nbytes != self.dst.nbytes:
            raise ConfigError(
                f"dst: holds {self.dst.nbytes} bytes, must hold the {self.src.nbytes} of src"
            )


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Ranks that ``scatter`` and ``barrier`` address together; made by ``Transfer.peer_group``."""

    ranks: tuple[int, ...]


class Operation:
    """What was queued by one call, and what became of it.

    ``sent`` is called once, when all of it is done and nothing has failed.
    """

    __slots__ = ("_left", "_sent", "error")

    def __init__(self, pieces: int = 1, sent: Callable[[], None] | None = None) -> None:
        self._left = pieces
        self._sent = sent
        self.error: TransportError | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or with ``error``: sources may change from now on."""
        return self._left == 0

    def piece_done(self, error: TransportError | None = None) -> None:
        """For transports: one of its pieces is over."""
        self._left -= 1
        self.error = self.error or error
        if self._left == 0 and self.error is None and self._sent is not None:
            self._sent()


@runtime_checkable
class Memory(Protocol):
    """Symmetric memory of a group's ranks."""

    def allocate(self, nbytes: int) -> Region:
        """Zero-filled, page-aligned memory that the peers reach too.

        Collective: every rank calls it with the same ``nbytes``, in the same order as its other
        allocations. ``ConfigError`` on all ranks where sizes differ, ``TransportError`` on all
        where one of them cannot.
        """
        ...

    def peer_pointer(self, rank: int, region: Region | None = None) -> int | None:
        """Where this process loads and stores the copy of ``region`` that ``rank`` has; ``None``
        when it cannot. ``region``: one that ``allocate`` returned; ``None``: the only one."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent, waits for nobody, may come in any order over ranks."""
        ...


@runtime_checkable
class Transfer(Memory, Protocol):
    """One-sided writes with immediates. One thread owns it; nothing here blocks on a peer."""

    @property
    def outstanding(self) -> int:
        """Writes that are not done: their ``src`` must stay as it is."""
        ...

    def register(self, region: Region) -> RemoteRegion:
        """Let peers write to ``region``; the result is for them."""
        ...

    def peer_group(self, ranks: Sequence[int]) -> PeerGroup:
        """A name for ``ranks``, in this order; prepares what writing to them needs."""
        ...

    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Operation:
        """Queue a write; ``src`` must stay as it is until ``sent`` is called from ``progress``.

        With ``imm`` (0 to 2³² − 1) the receiver counts it when the payload is there.
        """
        ...

    def scatter(
        self,
        group: PeerGroup,
        slices: Sequence[Write],
        imm: int | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Operation:
        """One write per rank of ``group``, in its order; ``sent`` comes once, after all."""
        ...

    def barrier(self, group: PeerGroup, imm: int) -> Operation:
        """Tell every rank of ``group`` that this rank is here: a write of nothing, with ``imm``.
        Waiting is each rank's own business: ``expect(imm, len(group.ranks), ...)``."""
        ...

    def expect(self, imm: int, count: int, notify: Callable[[], None]) -> None:
        """Call ``notify`` from ``progress`` once ``imm`` has come ``count`` times.

        Arrivals before the call count too; they are used up, so the next ``expect`` of the same
        ``imm`` starts from what came beyond ``count``. One at a time per ``imm``.
        """
        ...

    def progress(self) -> int:
        """Post, deliver and count what can be; never blocks. How much happened; 0: nothing.

        Raises:
            TransportError: a write failed; ``peer`` is whom it was for. The others go on. The
                write's ``Operation`` has the same error.
        """
        ...


def check_imm(imm: object) -> None:
    """Raise ``ConfigError`` unless ``imm`` is an integer of 32 bits."""
    if isinstance(imm, bool) or not isinstance(imm, int) or not 0 <= imm <= MAX_IMM:
        raise ConfigError(f"imm={imm!r}: must be an integer from 0 to {MAX_IMM}")


def _check_inside(offset: int, nbytes: int, have: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > have:
        raise ConfigError(
            f"offset={offset}, nbytes={nbytes}: must lie inside the region's {have} bytes"
        )
