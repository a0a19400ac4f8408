"""Ranks of several nodes: who reaches whom, which network joins the rest, and its mover."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, Final

from moecomm import env
from moecomm.agreement import SETUP_S, together
from moecomm.config import MoeConfig
from moecomm.errors import TransportUnavailable
from moecomm.group import Group
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.transport import AUTO, NETWORKS
from moecomm.transport.base import Region
from moecomm.transport.nodes import Nodes, find_nodes
from moecomm.transport.proxy.mover import Mover, engine_options

logger = logging.getLogger(__name__)

STAND_IN: Final = "efa"  # has one for machines without its device


def choose_network(group: Group, timeout_s: float) -> str:
    """What ``transport="auto"`` is: itself on one node; else a network that every rank has.

    Collective; the same on all ranks.
    """
    timeout_s = max(timeout_s, SETUP_S)
    nodes = find_nodes(group, timeout_s)
    if nodes.count == 1:
        return AUTO
    told = group.all_gather(" ".join(_usable()).encode(), timeout_s, "network")
    for name in NETWORKS:
        if all(name in blob.decode().split() for blob in told):
            logger.info("rank %d: transport %r: %s, which all have", group.rank, name, nodes)
            return name
    logger.warning(
        "rank %d: transport %r over a stand-in: %s, and they have no RDMA devices of one kind",
        group.rank,
        STAND_IN,
        nodes,
    )
    return STAND_IN


def choose(cfg: MoeConfig, group: Group, transport: str, kind: str) -> Remote | None:
    """``None`` where all ranks are on one node: then no network interface is touched.

    ``kind`` of device: with GPUs bytes bounce, since the network reaches memory of the host.

    Collective; the same on all ranks.

    Raises:
        TransportUnavailable: a simulation has nodes and no network between them.
    """
    nodes = find_nodes(group, max(cfg.timeout_s, SETUP_S))
    if nodes.count > 1 and group.simulation is not None:
        raise TransportUnavailable(
            f"transport={transport!r} runs in real time and cannot be part of a simulation"
        )
    if nodes.count == 1:
        logger.info("rank %d: %s: nothing goes by %r", group.rank, nodes, transport)
        return None
    logger.info("rank %d: %s, joined by %r", group.rank, nodes, transport)
    return Remote(mode="proxied", bounce=kind == "cuda" or env.flag("BOUNCE"))


def start_mover(
    layout: Layout,
    group: Group,
    transport: str,
    nodes: Nodes,
    areas: tuple[Region, Region],
    **engine_fields: Any,
) -> Mover:
    """The mover of this rank, on a transfer engine of its own. Collective.

    An engine serves one communicator: immediates need not be told apart, what breaks one exchange
    leaves the others alone, and its end is the communicator's.

    Args:
        areas: ``flags`` and ``bulk``.
        engine_fields: those of ``EngineOptions`` that depend on the device.

    Raises: as ``TransferEngine`` and ``Mover``.
    """
    assert layout.areas is not None
    timeout_s = layout.cfg.timeout_s
    setup_s = max(timeout_s, SETUP_S)
    module = import_module(NETWORKS[transport])
    # What this rank alone lacks is everybody's error, before they meet.
    together(group, "network", lambda: module.preflight() is None, setup_s)
    options = engine_options(layout.areas, group.size, setup_s, **engine_fields)
    engine = module.open_engine(group, options=options)
    flags, bulk = areas
    return Mover(engine, group, layout.areas, nodes.others, flags, bulk, timeout_s, setup_s)


def _usable() -> list[str]:
    """Networks whose devices this rank has."""
    return [name for name, module in NETWORKS.items() if import_module(module).has_device()]
