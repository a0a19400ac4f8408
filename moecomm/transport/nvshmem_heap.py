"""The symmetric heap of this process: NVSHMEM runs for one list of ranks at a time.

Starting, allocating and freeing are collective in NVSHMEM; closing a communicator is not. So what
a communicator gives back waits here until all ranks have given it back, which they find out at
their next allocation: then it is used again, or freed. NVSHMEM itself goes on until all ranks
``finalize``, or the process ends: stopping it waits for every rank, also for one that has died.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from moecomm.addresses import process
from moecomm.cuda_driver import free_bytes
from moecomm.errors import OutOfMemory, StateError, TransportUnavailable
from moecomm.group import Group
from moecomm.transport import nvshmem_library
from moecomm.transport.nvshmem_library import Library, bounded

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALIGN: Final = 1 << 21  # blocks of few sizes are found again more often
SIZE_VARIABLE: Final = "NVSHMEM_SYMMETRIC_SIZE"
LEAST_HEAP_BYTES: Final = 1 << 30
SPARE: Final = 2  # communicators like the first one that the heap has room for


@dataclass(frozen=True, slots=True)
class Block:
    """Symmetric memory. ``serial`` counts allocations, which all ranks make in the same order."""

    serial: int
    address: int
    nbytes: int


class Heap:
    """NVSHMEM for the processes ``members``, of which this is number ``rank``, on GPU ``index``."""

    def __init__(self, library: Library, members: list[str], rank: int, index: int) -> None:
        self.library = library
        self.members = members
        self.rank = rank
        self.index = index
        self._lock = threading.Lock()
        self._serial = 0
        self._free: dict[int, Block] = {}  # by serial
        self._used: set[int] = set()  # serials
        self._stopped = False  # or about to be: which, nobody knows after a PeerTimeout

    def allocate(self, group: Group, nbytes: int, timeout_s: float) -> Block:
        """At least ``nbytes``; contents are of no meaning. Collective.

        Raises:
            StateError: NVSHMEM was finalised.
            OutOfMemory: the heap has no room.
            PeerTimeout: a rank did not come.
        """
        padded = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            if self._stopped:
                raise StateError("allocate: NVSHMEM was finalised after this memory was opened")
            common = self._common(group, timeout_s)
            found = next((block for block in common if block.nbytes == padded), None)
            if found is not None:
                del self._free[found.serial]
                self._used.add(found.serial)
                return found
            for block in common:
                del self._free[block.serial]
                self._call("nvshmem_free", self.library.free, block.address, timeout_s)
            address = self._call("nvshmem_malloc", self.library.allocate, padded, timeout_s)
            if not address:
                size = os.environ.get(SIZE_VARIABLE, "its default")
                where = f"NVSHMEM's heap on GPU {self.index} ({SIZE_VARIABLE}={size})"
                raise OutOfMemory(padded, free_bytes(self.index), where)
            self._serial += 1
            self._used.add(self._serial)
            return Block(self._serial, address, padded)

    def give_back(self, block: Block) -> None:
        """The block is of no more use to this rank. Not collective."""
        with self._lock:
            self._used.discard(block.serial)
            self._free[block.serial] = block

    def finalize(self, group: Group, timeout_s: float) -> None:
        """Stop NVSHMEM: the heap is gone. Collective.

        Raises:
            StateError: a rank still uses memory of the heap; on every rank.
            PeerTimeout: a rank did not come.
        """
        told = group.all_gather(str(len(self._used)).encode(), timeout_s, "nvshmem_finalize")
        users = [str(rank) for rank, blob in enumerate(told) if int(blob)]
        if users:
            raise StateError(
                f"finalize: ranks {', '.join(users)} still have communicators open: close them"
            )
        with self._lock:
            self._stopped = True
        self._call("nvshmem_finalize", lambda _: self.library.finalize(), 0, timeout_s)

    def state_for(self, members: list[str], index: int | None = None) -> str:
        """``"same"`` if it serves these processes, on GPU ``index``; else what it is."""
        if self._stopped:
            return "finalising it has failed"
        if self.members == members and index in (None, self.index):
            return "same"
        return f"{len(self.members)} ranks on GPU {self.index}"

    def _common(self, group: Group, timeout_s: float) -> list[Block]:
        """Blocks that no rank uses any more; the same list everywhere."""
        mine = json.dumps(sorted(self._free)).encode()
        told = [set(json.loads(blob)) for blob in group.all_gather(mine, timeout_s, "allocate")]
        return [self._free[serial] for serial in sorted(set.intersection(*told))]

    def _call(self, what: str, function: Callable[[int], T], value: int, timeout_s: float) -> T:
        peer = other_rank(self.rank, len(self.members))
        return bounded(self.index, what, lambda: function(value), timeout_s, peer)


_lock: Final = threading.Lock()
_heap: Heap | None = None
_own_size: str | None = None  # what SIZE_VARIABLE was set to here, not by a user


def start(group: Group, index: int, heap_bytes: int, timeout_s: float) -> Heap:
    """The heap of ``group``'s processes; NVSHMEM is started if it does not run. Collective.

    ``heap_bytes``: what the communicator that starts it takes; the user's
    ``NVSHMEM_SYMMETRIC_SIZE`` wins.

    Raises:
        TransportUnavailable: ranks are threads, or NVSHMEM runs in one of the processes for other
            ranks or on another GPU; on every rank.
        PeerTimeout: a rank did not come.
    """
    global _heap, _own_size
    members = [blob.decode() for blob in group.all_gather(process().encode(), timeout_s)]
    if len(set(members)) < len(members):
        raise TransportUnavailable(
            "transport='nvshmem': every rank must be a process of its own; threads of one process "
            "use 'loopback'"
        )
    with _lock:
        library = nvshmem_library.load()
        unique_id = _agree(group, members, index, library, timeout_s)
        if _heap is None:
            os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast: for its collectives
            if os.environ.get(SIZE_VARIABLE) in (None, _own_size):
                _own_size = str(max(SPARE * heap_bytes, LEAST_HEAP_BYTES))
                os.environ[SIZE_VARIABLE] = _own_size
            peer = other_rank(group.rank, group.size)
            bounded(
                index,
                "nvshmem_init",
                lambda: library.init(group.rank, group.size, unique_id),
                timeout_s,
                peer,
            )
            _heap = Heap(library, members, group.rank, index)
            version = ".".join(map(str, library.version))
            logger.info("rank %d: NVSHMEM %s with %d PEs", group.rank, version, group.size)
        return _heap


def finalize(group: Group, timeout_s: float) -> None:
    """See ``moecomm.transport.nvshmem.finalize``."""
    global _heap
    members = [blob.decode() for blob in group.all_gather(process().encode(), timeout_s)]
    with _lock:
        state = "new" if _heap is None else _heap.state_for(members)
        told = group.all_gather(state.encode(), timeout_s, "nvshmem_finalize")
        if any(blob != b"same" for blob in told):
            states = "; ".join(f"rank {rank}: {b.decode()}" for rank, b in enumerate(told))
            raise StateError(
                "finalize: all ranks for which NVSHMEM runs must call it, in the same order; these "
                f"{group.size} find it as follows: {states} (new: it does not run)"
            )
        assert _heap is not None
        _heap.finalize(group, timeout_s)
        logger.info("rank %d: NVSHMEM is finalised", group.rank)
        _heap = None


def other_rank(rank: int, size: int) -> int:
    """Stands for all that may be missing."""
    return (rank + 1) % size


def _agree(
    group: Group, members: list[str], index: int, library: Library, timeout_s: float
) -> bytes:
    """Whether this group may use NVSHMEM; where nobody has started it, the identity to do so."""
    state = "new" if _heap is None else _heap.state_for(members, index)
    fresh = library.unique_id().hex() if state == "new" and group.rank == 0 else ""
    mine = json.dumps({"state": state, "id": fresh}).encode()
    told = [json.loads(blob) for blob in group.all_gather(mine, timeout_s, "nvshmem_init")]
    if len({message["state"] for message in told}) > 1 or state not in ("new", "same"):
        states = "; ".join(f"rank {rank}: {m['state']}" for rank, m in enumerate(told))
        raise TransportUnavailable(
            "transport='nvshmem': in a process NVSHMEM runs for one list of ranks at a time; these "
            f"{group.size} ranks find it as follows: {states}. Use the same ranks, in the same "
            "order and on the same GPUs, or let those for which it runs finalize first "
            "(moecomm.transport.nvshmem.finalize)"
        )
    return bytes.fromhex(told[0]["id"])
