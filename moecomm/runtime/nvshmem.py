"""NVSHMEM joined to the kernels: which peers kernels store to, and which they put to."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from moecomm import env
from moecomm.agreement import SETUP_S, together
from moecomm.config import MoeConfig
from moecomm.cuda_driver import attribute
from moecomm.errors import ConfigError
from moecomm.group import Group
from moecomm.kernels.nvshmem_link import check_versions, find_copy
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.runtime.devices import choose_index
from moecomm.transport.nvshmem import host_path, host_version, open_memory

logger = logging.getLogger(__name__)

NETWORK_CHUNK: Final = 8  # rows of 7 KiB: what a NIC likes
MAPPED_CHUNKS: Final = ((512, 2),)  # most tokens, and rows that a block stores in a microsecond
PROBE_BYTES: Final = 16


def choose(cfg: MoeConfig, group: Group, index: int | None) -> Remote | None:
    """Start NVSHMEM, and see who reaches whom; ``None``: every rank stores to every other.

    Collective; the same on all ranks. ``index``: this rank's GPU; ``None``: see ``choose_index``.

    Raises:
        TransportUnavailable: NVSHMEM is missing, its parts are of different versions, or it is in
            use for other ranks; on every rank.
        PeerTimeout: a rank did not come.
    """
    timeout_s = max(cfg.timeout_s, SETUP_S)
    index = together(group, "device", lambda: choose_index(group, index, timeout_s), timeout_s)
    together(group, "nvshmem", lambda: _check(index), timeout_s)
    with open_memory(group, index, _most_bytes(cfg, group)) as memory:
        region = memory.allocate(PROBE_BYTES)
        reachable, mapped = memory.everybody_reachable(region), memory.everybody_mapped(region)
    if reachable:
        logger.info("rank %d: NVSHMEM maps every peer: kernels store to them", group.rank)
        return None
    told = group.all_gather(str(_chunk(cfg, mapped)).encode(), timeout_s)
    chunk = int(told[0])  # the environment may differ between ranks
    logger.info("rank %d: kernels put with NVSHMEM, %d rows at once", group.rank, chunk)
    return Remote(mode="nvshmem", chunk=chunk)


def _most_bytes(cfg: MoeConfig, group: Group) -> int:
    """What the communicator takes of the heap, where kernels put; where they must not, less."""
    bulk = 0
    with contextlib.suppress(ConfigError):
        areas = Layout(
            cfg, group.size, group.rank, Remote(mode="nvshmem", chunk=NETWORK_CHUNK)
        ).areas
        assert areas is not None
        bulk = areas.flags.nbytes + areas.bulk.nbytes
    return Layout(cfg, group.size, group.rank).symmetric.nbytes + bulk


def _check(index: int) -> bool:
    """What concerns this rank alone: the copies of NVSHMEM."""
    major = attribute(index, "COMPUTE_CAPABILITY_MAJOR")
    minor = attribute(index, "COMPUTE_CAPABILITY_MINOR")
    check_versions(find_copy(), f"sm_{major}{minor}", host_version(), host_path())
    return True


def _chunk(cfg: MoeConfig, mapped: bool) -> int:
    """Rows of one put: few where the last of them waits for the others only, more where each put
    is a request to a NIC."""
    chosen = env.integer("NVSHMEM_CHUNK", 1)
    if chosen is not None:
        return chosen
    for tokens, chunk in MAPPED_CHUNKS if mapped else ():
        if cfg.max_tokens <= tokens:
            return chunk
    return NETWORK_CHUNK
