"""``Group``: the ranks that communicate, and a small exchange of bytes between them.

The exchange serves set-up only (addresses, configurations, handles); nothing on the path of a
dispatch uses it. It runs over a key-value store, never over another library's collectives, so
that a group does not care whether ``torch.distributed`` is still there.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from moecomm.config import MAX_RANKS
from moecomm.errors import ConfigError, PeerTimeout, StateError, TransportError
from moecomm.group_parts import Lifetime, pack_missing, pack_values, unpack_values
from moecomm.store import Store

DEFAULT_TIMEOUT_S: Final = 30.0


class Group:
    """``size`` ranks, numbered from 0, of which this process is ``rank``.

    Every rank must construct its groups on one store in the same order, because a group's keys
    are told apart by that order. Creating a group, or a ``subgroup``, waits for nobody.

    Args:
        rank: this process, 0 to ``size - 1``.
        size: number of ranks, 1 to 1024.
        store: anything with ``set``, ``get``, ``add`` and ``delete`` (see ``moecomm.store``).
        name: tells groups of different members apart that were made on one store; not needed for
            those of ``subgroup``.
        simulation: the in-process simulation that the ranks live in, or ``None``.
        device: what ``MoeComm`` uses unless it is told otherwise; ``None``: it decides.
        transport: the same for the transport.
        on_close: called once, when this group and all of its subgroups are closed.

    Raises:
        ConfigError: a rank or size out of range.
        StateError: used after ``close``, or in a process forked from the one that made it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        name: str = "",
        simulation: Any = None,
        device: str | None = None,
        transport: str = "auto",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        _check_range("size", size, 1, MAX_RANKS)
        _check_range("rank", rank, 0, size - 1)
        # Counted in the store rather than here: a second client of the same store, in this
        # process or after a restart of all ranks, must not meet the first one's keys.
        world = f"moecomm/{quote(name, safe='')}.{size}"
        nth = store.add(f"{world}/rank {rank}", 1)
        self._setup(rank, size, store, f"{world}.{nth}", Lifetime(on_close))
        self.simulation = simulation
        self.device = device
        self.transport = transport

    def _setup(self, rank: int, size: int, store: Store, prefix: str, lifetime: Lifetime) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self._prefix = prefix
        self._lifetime = lifetime
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._rounds = itertools.count()
        self._names: Counter[str] = Counter()
        self._stale: str | None = None  # this rank's key of the round before
        lifetime.enter()

    @classmethod
    def from_torch(
        cls, process_group: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Group:
        """The ranks of a ``torch.distributed`` process group (``None``: the default one).

        Collective over the process group, once: rank 0 serves a store and its address travels
        through one ``all_gather``. After that nothing of torch is used, so the process group may
        be destroyed before or after ``close``. Ranks are the group's own, not the world's. With
        an NCCL backend ``MoeComm`` takes torch's current GPU unless it is told otherwise.
        """
        from moecomm.rendezvous import from_torch

        return from_torch(process_group, timeout_s)

    @classmethod
    def from_env(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Group:
        """The ranks that a launcher started: torchrun, Open MPI, MPICH (PMI) or Slurm.

        See ``moecomm.rendezvous`` for the variables that are read and the port that is used.
        """
        from moecomm.rendezvous import from_env

        return from_env(timeout_s)

    @classmethod
    def from_mpi(cls, comm: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Group:
        """The ranks of an mpi4py communicator (anything with ``Get_rank``, ``Get_size`` and
        ``allgather`` of Python objects). Collective over it, once."""
        from moecomm.rendezvous import from_mpi

        return from_mpi(comm, timeout_s)

    def all_gather(
        self, value: bytes, timeout_s: float = DEFAULT_TIMEOUT_S, label: str = "bootstrap"
    ) -> list[bytes]:
        """Everybody's ``value``, in rank order. Collective; calls match by their order.

        Raises:
            PeerTimeout: a rank did not come; ``phase`` is ``label``, ``peer`` the lowest missing
                rank, ``expected`` the group's size and ``seen`` how many came. Every rank that
                waits raises it, naming the same peer.
        """
        self._check_usable()
        with self._lock:
            key = f"{self._prefix}/gather/{next(self._rounds)}"
        if self.size == 1:
            return [bytes(value)]
        left = self._countdown(timeout_s)
        if self.rank == 0:
            return self._gather(key, value, left, label)
        return self._contribute(key, value, left, label)

    def barrier(self, timeout_s: float = DEFAULT_TIMEOUT_S, label: str = "barrier") -> None:
        """Return when every rank has called it; raises like ``all_gather``."""
        self.all_gather(b"", timeout_s, label)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of ``ranks`` of this one, numbered in the order given; ``None`` for the others.

        Not collective: nobody else has to call it, and nobody is waited for. Members must ask for
        equal lists in the same order as each other.
        """
        self._check_usable()
        members = [int(r) for r in ranks]
        for r in members:
            if not 0 <= r < self.size:
                raise ConfigError(f"ranks={members}: {r} is not a rank of {self.size}")
        if not members or len(set(members)) != len(members):
            raise ConfigError(f"ranks={members}: must name at least one rank, each one once")
        if self.rank not in members:
            return None
        group = Group.__new__(Group)
        prefix = self.instance_key("ranks " + ".".join(map(str, members)))
        group._setup(members.index(self.rank), len(members), self.store, prefix, self._lifetime)
        group.simulation, group.device, group.transport = (
            self.simulation,
            self.device,
            self.transport,
        )
        return group

    def child(self) -> Group:
        """The same ranks with keys and call order of their own, so that two users of one group
        (say, two ``MoeComm``) need not agree on the order of their calls."""
        group = self.subgroup(range(self.size))
        assert group is not None
        return group

    def instance_key(self, label: str) -> str:
        """A name that no other use of the store has: the same on every rank for its n-th call
        with ``label`` on this group."""
        self._check_usable()
        with self._lock:
            self._names[label] += 1
            return f"{self._prefix}/{quote(label, safe='')}.{self._names[label]}"

    def close(self) -> None:
        """Let go of the store. Idempotent, waits for no rank, does nothing in a forked child.

        The rank that serves the store ends it with its last group; see ``moecomm.rendezvous``.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._lifetime.leave()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Group rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise StateError("a Group belongs to its process and cannot be pickled or copied")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this Group belongs to process {self._pid}; process {os.getpid()} was forked from "
                "it and must not use it"
            )
        if self._closed:
            raise StateError("the Group is closed")

    def _countdown(self, timeout_s: float) -> Callable[[], float]:
        """How long a wait may still last. A simulation's clock is its own, so there every wait
        gets the whole time: what the host's clock says would decide the outcome at random."""
        if self.simulation is not None:
            return lambda: timeout_s
        deadline = time.monotonic() + timeout_s
        return lambda: deadline - time.monotonic()

    def _gather(self, key: str, value: bytes, left: Callable[[], float], label: str) -> list[bytes]:
        """Rank 0: collect, publish, clean up. O(size) requests in all instead of O(size²)."""
        self.store.set(f"{key}/0", b"")
        values, expired = {0: bytes(value)}, False
        for rank in range(1, self.size):
            try:
                values[rank] = self.store.get(f"{key}/{rank}", 0.0 if expired else left())
            except TimeoutError:
                expired = True  # the others are looked up without waiting
        missing = [r for r in range(self.size) if r not in values]
        result = pack_missing(missing) if missing else pack_values(values)
        self.store.set(f"{key}/all", result)
        # All came to this round, so all have left the one before it.
        if self._stale is not None and not missing:
            self.store.delete(f"{self._stale}/0")
            self.store.delete(f"{self._stale}/all")
        self._stale = key
        if missing:
            raise self._timeout(label, missing[0], len(values))
        return [values[r] for r in range(self.size)]

    def _contribute(
        self, key: str, value: bytes, left: Callable[[], float], label: str
    ) -> list[bytes]:
        mine, wanted = f"{key}/{self.rank}", f"{key}/all"
        # Not after this round: once rank 0 has published, it may leave, and the store with it.
        if self._stale is not None:
            self.store.delete(f"{self._stale}/{self.rank}")
        self._stale = key
        try:
            exchange = getattr(self.store, "exchange", None)
            if exchange is not None:
                result: bytes = exchange(mine, bytes(value), wanted, left())
            else:
                self.store.set(mine, bytes(value))
                result = self.store.get(wanted, left())
        except TimeoutError:
            raise self._blame(key, label) from None
        if result[:1] == b"v":
            return unpack_values(result[1:])
        missing = [int(r) for r in result[1:].split(b",")]
        others = [r for r in missing if r != self.rank]
        if others:
            raise self._timeout(label, others[0], self.size - len(missing))
        raise TransportError(
            f"rank {self.rank} came to {label} after rank 0 had stopped waiting for it",
            peer=0,
            operation=label,
        )

    def _blame(self, key: str, label: str) -> PeerTimeout:
        """Rank 0 published nothing in time: say who has not come, else rank 0 itself."""
        missing = []
        for rank in range(self.size):
            try:
                self.store.get(f"{key}/{rank}", 0.0)
            except TimeoutError:
                missing.append(rank)
        return self._timeout(label, missing[0] if missing else 0, self.size - len(missing))

    def _timeout(self, label: str, peer: int, seen: int) -> PeerTimeout:
        return PeerTimeout(label, peer, self.size, seen, rank=self.rank)


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: must be an integer from {low} to {high}")
