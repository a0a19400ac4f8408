"""What an engine takes at its set-up, and gives back at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Final

from moecomm.errors import ConfigError
from moecomm.group import Group
from moecomm.transport.engine import topology
from moecomm.transport.engine.blocks import Block
from moecomm.transport.engine.build import Memory
from moecomm.transport.engine.options import EngineOptions
from moecomm.transport.engine.provider import Nic, NicOpener, Sizing
from moecomm.transport.engine.worker import Worker

_leaked: Final[list[object]] = []  # what a worker that does not stop may still touch


class Resources:
    """What must be let go of, in order, also when nobody calls ``close``."""

    def __init__(self, worker: Worker) -> None:
        self.pid = os.getpid()
        self.worker = worker
        self.nics: tuple[Nic, ...] = ()
        self.memory: Memory | None = None
        self.blocks: list[Block] = []
        self.held: list[object] = []
        self.stopped = False

    def close(self) -> None:
        """Stop the worker, close the NICs, free the memory. Only in the process that made it."""
        if os.getpid() != self.pid:
            return
        self.stopped = self.worker.stop()
        if not self.stopped:
            _leaked.append((self.nics, self.memory, self.blocks, self.held))
            return
        for nic in self.nics:
            nic.close()
        if self.memory is not None:
            self.memory.free()
        # It is registered no more. The engine may be part of a cycle, and memory of a GPU is not to
        # wait for the garbage collector.
        self.held.clear()


def agree(
    group: Group,
    openers: Sequence[NicOpener],
    options: EngineOptions,
    cuda_device: int | None,
    timeout_s: float,
) -> Sizing:
    """Compare what peers depend on, and say what NICs are opened for.

    Raises:
        ConfigError: ranks differ; on every rank, naming the field, both values and the rank.
        PeerTimeout: a rank did not come.
    """
    size = group.size
    mine = {
        "number of NICs": len(openers),
        "kinds of NICs": ", ".join(opener.transport for opener in openers),
        "rx_depth": options.arrivals(size),
        "message_bytes": options.message_bytes,
        "messages_per_peer": options.messages_per_peer,
    }
    blob = json.dumps(mine).encode()
    told = [json.loads(m) for m in group.all_gather(blob, timeout_s, "engine")]
    for field, value in told[0].items():
        for rank, theirs in enumerate(told):
            if theirs[field] != value:
                raise ConfigError(
                    f"{field}: {value} on rank 0, {theirs[field]} on rank {rank}; must be "
                    "equal on all ranks"
                )
    messages = options.messages_per_peer * size if options.message_bytes else 0
    return Sizing(
        num_peers=size,
        tx_depth=options.tx_depth,
        rx_depth=options.arrivals(size),
        message_bytes=options.message_bytes + 16 if messages else 0,
        num_messages=messages,
        cuda_device=cuda_device,
    )


def cpus_for(options: EngineOptions, cuda_device: int | None) -> frozenset[int]:
    """Processors of the worker; empty: any."""
    if options.cpus is not None:
        return options.cpus
    if cuda_device is None:
        return frozenset()
    return topology.cpus_near(topology.pci_address_of(cuda_device))
