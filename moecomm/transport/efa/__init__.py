"""The ``efa`` transport: a transfer engine over libfabric.

On AWS the provider is EFA. Everywhere else one of its stand-ins runs the same code: ``tcp``
between processes of any machines, ``shm`` inside one. ``MOECOMM_FABRIC`` chooses;
``fabrics.py`` has what differs between them, as data.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from moecomm import env
from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.transport.efa.fabrics import AUTO, FABRICS, VARIABLES, Fabric
from moecomm.transport.efa.library import Library, copies
from moecomm.transport.engine import topology

if TYPE_CHECKING:
    from moecomm.group import Group
    from moecomm.transport.efa.opener import FabricOpener
    from moecomm.transport.engine import EngineOptions, TransferEngine

logger = logging.getLogger(__name__)

_INSTALL = 'pip install "moecomm[efa]"'


def open_memory(group: Group) -> TransferEngine:
    """What ``moecomm.transport.open_memory("efa", group)`` returns."""
    return open_engine(group)


def open_engine(
    group: Group,
    fabric: str | None = None,
    *,
    num_nics: int | None = None,
    options: EngineOptions | None = None,
    cuda_device: int | None = None,
) -> TransferEngine:
    """A transfer engine over libfabric. Collective over ``group``.

    Args:
        fabric: one of ``FABRICS``, or ``"auto"``: ``"efa"`` where there is such a device, else
            ``"tcp"``; ``None``: what ``MOECOMM_FABRIC`` says, else ``"auto"``.
        num_nics: interfaces to use, or with stand-ins to pretend; ``None``: what ``MOECOMM_NICS``
            says, else all EFA devices near the GPU, or one interface of a stand-in.

    Raises: as ``TransferEngine``.
    """
    from moecomm.agreement import together
    from moecomm.group import DEFAULT_TIMEOUT_S
    from moecomm.transport.engine import jit
    from moecomm.transport.engine.engine import TransferEngine

    if group.simulation is not None:
        raise TransportUnavailable(
            "transport='efa' runs in real time: a simulation has 'loopback' alone"
        )
    jit.load("moecomm.transport.efa.hot")
    nics = together(
        group, "open", lambda: openers(fabric, num_nics, cuda_device), DEFAULT_TIMEOUT_S
    )
    return TransferEngine(group, nics, options=options, cuda_device=cuda_device)


def preflight() -> None:
    """Raise what ``openers`` would: this rank has no interface to use."""
    openers()


def has_device() -> bool:
    """Whether this machine has an EFA device that works."""
    try:
        return bool(openers("efa"))
    except TransportUnavailable as error:
        logger.debug("%s", error)
        return False


def openers(
    fabric: str | None = None, num_nics: int | None = None, cuda_device: int | None = None
) -> list[FabricOpener]:
    """The interfaces that ``open_engine`` uses.

    Raises:
        ConfigError: no such fabric, or too few interfaces.
        TransportUnavailable: there is no libfabric, or none of its interfaces fits.
    """
    name = fabric or env.get("FABRIC") or AUTO
    if name not in FABRICS and name != AUTO:
        raise ConfigError(f"fabric={name!r}: must be one of {', '.join((AUTO, *FABRICS))}")
    if num_nics is None:
        num_nics = env.integer("NICS", 1, 64)
    for variable in VARIABLES:
        if variable in os.environ:
            logger.info("libfabric is told %s=%s", variable, os.environ[variable])
    wanted = FABRICS["efa"] + FABRICS["tcp"] if name == AUTO else FABRICS[name]
    refusals = []
    for kind in map(_bound, wanted):
        for library in copies():
            found, why = _interfaces(library, kind, cuda_device)
            if found:
                return _choose(library, kind, found, num_nics, cuda_device)
            refusals.append(f"{kind.name} of {library.path}: {why}")
    raise TransportUnavailable(
        f"transport='efa': no interface for {name!r} ({'; '.join(refusals)}). {_INSTALL} brings a "
        "libfabric with efa, tcp and shm; EFA needs an instance with an EFA device and its driver "
        "(see `moecomm doctor`)"
    )


def _bound(fabric: Fabric) -> Fabric:
    """With the local address that the user names, for fabrics over IP."""
    address = env.get("FABRIC_ADDRESS")
    if address is None or fabric.node is None:
        return fabric
    return dataclasses.replace(fabric, node=address)


def _interfaces(library: Library, fabric: Fabric, cuda_device: int | None) -> tuple[list[str], str]:
    from moecomm.transport.efa.opener import devices

    if cuda_device is not None and not fabric.on_gpus:
        return [], "takes no GPU memory"
    code, infos = library.interfaces(fabric, cuda_device is not None)
    try:
        return list(devices(infos)), f"{library.strerror(code)} ({code})"
    finally:
        for info in infos:
            library.free(info)


def _choose(
    library: Library,
    fabric: Fabric,
    found: list[str],
    num_nics: int | None,
    cuda_device: int | None,
) -> list[FabricOpener]:
    from moecomm.transport.efa.opener import FabricOpener

    if fabric.provider != "efa":
        # Stand-ins: several endpoints on one interface pretend to be several interfaces.
        return [FabricOpener(library, fabric, found[0]) for _ in range(num_nics or 1)]
    if cuda_device is not None:
        found = topology.nearest(found, topology.pci_address_of(cuda_device))
    if num_nics is not None and num_nics > len(found):
        raise ConfigError(f"num_nics={num_nics}: there are {len(found)} ({', '.join(found)})")
    return [FabricOpener(library, fabric, device) for device in found[:num_nics]]
