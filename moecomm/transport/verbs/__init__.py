"""The ``verbs`` transport: a transfer engine over libibverbs (ConnectX and other RDMA devices, on
InfiniBand or RoCE, and soft-RoCE).

A thin layer over the system's ``libibverbs.so.1``, without a binding in between: ``abi`` has the
library's structures, ``library`` its functions, ``nic`` is what the engine drives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from moecomm import env
from moecomm.addresses import meeting_addresses
from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.store import TcpStore
from moecomm.transport.engine import topology
from moecomm.transport.verbs.devices import Port, choose_ports
from moecomm.transport.verbs.library import library as load_library

if TYPE_CHECKING:
    from moecomm.group import Group
    from moecomm.transport.engine import EngineOptions, TransferEngine
    from moecomm.transport.verbs.queues import Parameters

logger = logging.getLogger(__name__)

BOOTSTRAPS: Final = ("datagrams", "store")


def open_memory(group: Group) -> TransferEngine:
    """What ``moecomm.transport.open_memory("verbs", group)`` returns."""
    return open_engine(group)


def open_engine(
    group: Group,
    ports: Sequence[str] | None = None,
    *,
    num_nics: int | None = None,
    parameters: Parameters | None = None,
    gid_index: int | None = None,
    bootstrap: str | None = None,
    options: EngineOptions | None = None,
    cuda_device: int | None = None,
) -> TransferEngine:
    """A transfer engine over RDMA ports. Collective over ``group``.

    Args:
        ports: names of ports, such as ``"mlx5_0"`` or ``"mlx5_0:2"``; ``None``: what
            ``MOECOMM_RDMA_PORTS`` says, else every active one (near the GPU, if there is one).
        num_nics: how many of them; ``None``: what ``MOECOMM_NICS`` says, else all.
        parameters: of the connections; ``None``: the defaults, with the traffic class and service
            level of ``MOECOMM_RDMA_TRAFFIC_CLASS`` and ``MOECOMM_RDMA_SERVICE_LEVEL``.
        gid_index: which of a port's addresses; ``None``: what ``MOECOMM_GID_INDEX`` says, else the
            best one.
        bootstrap: how ranks connect: by ``"datagrams"``, or over the group's ``"store"``; ``None``:
            what ``MOECOMM_RDMA_BOOTSTRAP`` says, else by datagrams.

    Raises: as ``TransferEngine``, and ``ConfigError``: no such port, address or bootstrap.
    """
    from moecomm.agreement import together
    from moecomm.group import DEFAULT_TIMEOUT_S
    from moecomm.transport.engine import jit
    from moecomm.transport.engine.engine import TransferEngine
    from moecomm.transport.verbs.bootstrap import StoreBootstrap
    from moecomm.transport.verbs.nic import VerbsOpener
    from moecomm.transport.verbs.queues import Parameters

    if group.simulation is not None:
        raise TransportUnavailable(
            "transport='verbs' runs in real time: a simulation has 'loopback' alone"
        )
    bootstrap = bootstrap or env.get("RDMA_BOOTSTRAP") or BOOTSTRAPS[0]
    if bootstrap not in BOOTSTRAPS:
        raise ConfigError(f"bootstrap={bootstrap!r}: must be one of {', '.join(BOOTSTRAPS)}")
    prefix = group.instance_key("verbs")
    over_store = partial(StoreBootstrap, group.store, prefix) if bootstrap == "store" else None
    if parameters is None:
        parameters = Parameters(
            traffic_class=env.integer("RDMA_TRAFFIC_CLASS", 0, 255) or 0,
            service_level=env.integer("RDMA_SERVICE_LEVEL", 0, 15) or 0,
        )
    store = group.store
    near = meeting_addresses(store.address[0] if isinstance(store, TcpStore) else "")
    jit.load("moecomm.transport.verbs.hooks")
    chosen = together(
        group, "open", lambda: choose(ports, num_nics, cuda_device), DEFAULT_TIMEOUT_S
    )
    nics = [VerbsOpener(port, parameters, gid_index, over_store, near) for port in chosen]
    return TransferEngine(group, nics, options=options, cuda_device=cuda_device)


def preflight() -> None:
    """Raise what ``choose`` would, or the library: this rank has no port to use."""
    choose(None, None, None)
    load_library()


def has_device() -> bool:
    """Whether this machine has an active RDMA port, and the library."""
    try:
        preflight()
    except TransportUnavailable as error:
        logger.debug("%s", error)
        return False
    return True


def choose(
    names: Sequence[str] | None, num_nics: int | None, cuda_device: int | None
) -> list[Port]:
    """The ports that ``open_engine`` uses.

    Raises:
        ConfigError: no such port, or too few.
        TransportUnavailable: none that works.
    """
    named = names is not None or env.get("RDMA_PORTS") is not None
    ports = choose_ports(names)
    if cuda_device is not None and not named:
        found = [port.device for port in ports]
        near = topology.nearest(found, topology.pci_address_of(cuda_device))
        ports = [port for port in ports if port.device in near]
    if num_nics is None:
        num_nics = env.integer("NICS", 1, 64)
    if num_nics is not None and num_nics > len(ports):
        raise ConfigError(
            f"num_nics={num_nics}: there are {len(ports)} ports ({', '.join(map(str, ports))})"
        )
    return ports[:num_nics]
