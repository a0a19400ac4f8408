"""Set-up of an engine, its memory and its end: what needs no traffic."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

from moecomm.agreement import together
from moecomm.errors import ConfigError, MoecommError, TransportError, TransportUnavailable
from moecomm.group import Group
from moecomm.transport.allocation import agree_on_size, find_region, refusal
from moecomm.transport.base import Region, RemoteRegion, check_rank, check_usable
from moecomm.transport.engine import jit
from moecomm.transport.engine import state as S
from moecomm.transport.engine.blocks import Block, check_mapped
from moecomm.transport.engine.build import ControlPeer, Memory
from moecomm.transport.engine.options import EngineOptions
from moecomm.transport.engine.provider import Nic, NicOpener, Registration
from moecomm.transport.engine.regions import Regions, Registered, to_remote
from moecomm.transport.engine.setup import Resources, agree, cpus_for
from moecomm.transport.engine.worker import Worker

logger = logging.getLogger(__name__)

_HOT: Final = ("moecomm.transport.engine.loop", "moecomm.transport.engine.ring")


class SymmetricMemory:
    """``Memory`` that NICs reach, on the CPU, and a running loop.

    Args: see ``TransferEngine``.
    """

    def __init__(
        self,
        group: Group,
        openers: Sequence[NicOpener],
        options: EngineOptions,
        cuda_device: int | None,
        timeout_s: float,
    ) -> None:
        if not openers:
            raise ConfigError("openers: must be at least one NIC")
        if group.simulation is not None:
            raise TransportUnavailable(
                "a transfer engine runs in real time and cannot be part of a simulation"
            )
        jit.load(*_HOT)
        self._pid = os.getpid()
        self._group = group.child()
        self._options = options
        self._timeout_s = timeout_s
        self._closed = False
        self._allocated: dict[Region, Block] = {}
        self._regions = Regions()
        self._sizing = agree(self._group, openers, options, cuda_device, timeout_s)
        worker = Worker(f"moecomm engine of rank {self.rank}", cpus_for(options, cuda_device))
        self._resources = Resources(worker)
        self._finalizer = weakref.finalize(self, self._resources.close)
        try:
            self._open(openers)
            self._connect()
        except BaseException:
            self._finalizer()
            self._group.close()
            raise

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def num_nics(self) -> int:
        """NICs of each rank."""
        return len(self._nics)

    @property
    def transport(self) -> str:
        """What its NICs call theirs, such as ``"efa"``."""
        return self._nics[0].transport

    @property
    def max_write_bytes(self) -> int:
        """The longest single write."""
        return min(nic.limits.max_bytes for nic in self._nics)

    @property
    def running(self) -> bool:
        """Whether the loop runs: it is not closed, and nothing has ended it."""
        return not self._closed and int(self._memory.word(S.FAULT)) == 0

    @property
    def stopped(self) -> bool:
        """Whether ``close`` has ended the loop, so that nothing touches its memory any more."""
        return self._resources.stopped

    def hold(self, *things: object) -> None:
        """Keep what the loop touches alive as long as it may run: for ever, if it does not stop."""
        self._resources.held += things

    @property
    def state(self) -> int:
        """Address of the engine's records, for programs."""
        self._check_usable()
        return self._memory.engine

    def allocate(self, nbytes: int) -> Region:
        """See ``Memory.allocate``; the region is registered with all NICs.

        Raises:
            ConfigError: not a positive size, or not the same on all ranks; raised on all of them.
            TransportError: a rank has not enough memory, or a NIC refuses it; raised on all.
            PeerTimeout: a rank does not allocate; ``phase`` is ``"allocate"``.
        """
        self._check_usable()
        refused = refusal(nbytes)
        message: dict[str, Any] = {"refused": refused} if refused else {"nbytes": nbytes}
        block, failed = None, None
        if not refused:
            try:
                block = Block(nbytes)
                registered = self._register(Region(block.address, block.nbytes))
            except MoecommError as error:
                failed = error
                message["failed"] = f"{type(error).__name__}: {error}"
        told = [
            json.loads(m)
            for m in self._group.all_gather(
                json.dumps(message).encode(), self._timeout_s, "allocate"
            )
        ]
        try:
            agree_on_size(told)
            if failed is not None:
                raise failed
            for rank, theirs in enumerate(told):
                if "failed" in theirs:
                    text = f"rank {rank} failed in allocate: {theirs['failed']}"
                    raise self._named(TransportError(text, peer=rank, operation="allocate"))
        except MoecommError:
            if block is not None and failed is None:
                self._deregister(registered)
            raise
        assert block is not None
        region = Region(block.address, nbytes)
        self._allocated[region] = block
        self._resources.blocks.append(block)
        return region

    def register(
        self, region: Region, *, on_gpu: bool = False, dmabuf_fd: int | None = None
    ) -> RemoteRegion:
        """See ``Transfer.register``: any memory of this process, or with ``on_gpu`` memory of the
        engine's GPU. What ``allocate`` returned is registered already, and so are its parts.

        Raises:
            ConfigError: it is not memory of this process.
            TransportError: a NIC refuses it.
        """
        self._check_usable()
        with contextlib.suppress(ConfigError):
            return self._part_of(self._regions.find(region), region)
        if on_gpu:
            if self._sizing.cuda_device is None:
                raise ConfigError("on_gpu=True: the engine was made without a cuda_device")
        elif region.nbytes <= 0:
            raise ConfigError(f"region={region}: must have at least one byte")
        else:
            check_mapped(region)
        return to_remote(self.rank, self._register(region, on_gpu, dmabuf_fd))

    def deregister(self, region: Region) -> None:
        """Take back a ``register`` of exactly this region. Peers must not write to it any more.

        Raises:
            ConfigError: it was not registered, or belongs to ``allocate``.
        """
        self._check_usable()
        for registered in self._regions:
            if registered.region == region and region.address not in {
                r.address for r in self._allocated
            }:
                self._deregister(registered)
                return
        raise ConfigError(f"region={region}: must be one that register was given")

    def peer_pointer(self, rank: int, region: Region | None = None) -> int | None:
        """See ``Memory.peer_pointer``: this rank's own; peers are reached by writes alone."""
        self._check_usable()
        region = find_region(self._allocated, region)
        check_rank(rank, self.size)
        return region.address if rank == self.rank else None

    def close(self) -> None:
        """See ``Memory.close``."""
        if self._closed or not self._owns():
            return
        self._closed = True
        self._finalizer()
        self._group.close()

    # ---- Set-up ---------------------------------------------------------------------------------

    def _open(self, openers: Sequence[NicOpener]) -> None:
        """Open the NICs on the pinned thread, so that their queues are near it."""
        opened: list[Nic] = []

        def open_all() -> tuple[Nic, ...]:
            try:
                for opener in openers:
                    opened.append(opener.open(self._sizing))
            finally:
                self._resources.nics = tuple(opened)
            return tuple(opened)

        self._nics = together(
            self._group,
            "open",
            lambda: self._resources.worker.call(open_all, self._timeout_s),
            self._timeout_s,
        )
        self._memory = Memory(self._nics, self.size, self._options, self._sizing)
        self._resources.memory = self._memory
        devices = ", ".join(f"{nic.device} ({nic.transport})" for nic in self._nics)
        logger.info("rank %d: transfer engine over %s", self.rank, devices)

    def _connect(self) -> None:
        control = Region(self._memory.control.address, self._memory.control.nbytes)
        self._control = together(
            self._group, "register", lambda: self._register(control), self._timeout_s
        )
        hello = {
            "addresses": [nic.address().hex() for nic in self._nics],
            "rows": [[r.remote_base, r.remote_key] for r in self._control.nics],
        }
        blob = json.dumps(hello).encode()
        told = [json.loads(m) for m in self._group.all_gather(blob, self._timeout_s, "connect")]

        def connect() -> bool:
            for index, nic in enumerate(self._nics):
                peers = [bytes.fromhex(theirs["addresses"][index]) for theirs in told]
                nic.connect(peers, self._timeout_s)
            return True

        together(self._group, "connect", connect, self._timeout_s)
        self.control_rows: list[list[tuple[int, int]]] = []
        for index in range(self.num_nics):
            rows = []
            for peer, theirs in enumerate(told):
                base, key = theirs["rows"][index]
                other = ControlPeer(base + self._memory.row(index, self.rank), key)
                self._memory.set_channel(index, peer, other, self._control.nics[index].local_key)
                rows.append((other.remote_row, other.remote_key))
            self.control_rows.append(rows)
        self._resources.worker.start(self._memory.engine)

    # ---- Memory ---------------------------------------------------------------------------------

    def _register(
        self, region: Region, on_gpu: bool = False, dmabuf_fd: int | None = None
    ) -> Registered:
        done: list[Registration] = []
        with self._resources.worker.paused():
            try:
                for nic in self._nics:
                    done.append(nic.register(region, on_gpu=on_gpu, dmabuf_fd=dmabuf_fd))
            except MoecommError:
                for nic, registration in zip(self._nics, done, strict=False):
                    nic.deregister(registration)
                raise
        return self._regions.add(region, done)

    def _deregister(self, registered: Registered) -> None:
        self._regions.remove(registered)
        with self._resources.worker.paused():
            for nic, registration in zip(self._nics, registered.nics, strict=True):
                nic.deregister(registration)

    def _part_of(self, registered: Registered, region: Region) -> RemoteRegion:
        whole = to_remote(self.rank, registered)
        return whole.part(region.address - registered.region.address, region.nbytes)

    def _owns(self) -> bool:
        return os.getpid() == self._pid

    def _check_usable(self) -> None:
        check_usable(self._pid, self._closed)

    def _named(self, error: TransportError) -> TransportError:
        error.transport = self._nics[0].transport
        return error
