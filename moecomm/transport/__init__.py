"""How bytes reach a peer. ``open_memory`` picks a backend by name and imports only that one.

Nothing here imports ``moecomm.kernels``; ``moecomm.runtime`` joins the two.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from moecomm.addresses import process
from moecomm.errors import ConfigError, TransportUnavailable

if TYPE_CHECKING:
    from moecomm.group import Group
    from moecomm.transport.base import Memory
    from moecomm.transport.engine import EngineOptions as EngineOptions
    from moecomm.transport.engine import TransferEngine as TransferEngine
    from moecomm.transport.gpu_memory import GpuMemory

logger = logging.getLogger(__name__)

# name → module with open_memory(group)
TRANSPORTS: Final = {
    "loopback": "moecomm.transport.loopback",
    "nvlink": "moecomm.transport.nvlink",
    "nvshmem": "moecomm.transport.nvshmem",
    "verbs": "moecomm.transport.verbs",
    "efa": "moecomm.transport.efa",
}
# The same for memory on GPUs: open_memory(group, index).
_ON_GPUS: Final = {
    "loopback": "moecomm.transport.loopback_gpu",
    "nvlink": "moecomm.transport.nvlink",
    "nvshmem": "moecomm.transport.nvshmem",
}
# Those of them that a host thread serves between nodes, the preferred first: modules with
# open_engine(group, options=...), preflight() and has_device().
NETWORKS: Final = {
    "efa": "moecomm.transport.efa",
    "verbs": "moecomm.transport.verbs",
}
AUTO: Final = "auto"


def check_name(name: object) -> None:
    """Raise ``ConfigError`` unless ``name`` is ``"auto"`` or a known transport."""
    if name != AUTO and name not in TRANSPORTS:
        known = ", ".join(map(repr, (AUTO, *TRANSPORTS)))
        raise ConfigError(f"transport={name!r}: must be one of {known}")


def open_memory(name: str, group: Group) -> Memory:
    """Memory of the CPU that all ranks of ``group`` reach, by the transport ``name``.

    Raises:
        ConfigError: no transport has this name.
        TransportUnavailable: it cannot be used here.
    """
    check_name(name)
    if name == AUTO:
        name = "loopback"
        logger.info(
            "rank %d: transport 'loopback': the ranks compute on the CPU, and it reaches every "
            "process of one machine",
            group.rank,
        )
    if name in _ON_GPUS and name != "loopback":
        raise TransportUnavailable(
            f"transport={name!r} joins GPUs: use device='cuda', or 'loopback' on the CPU"
        )
    memory: Memory = import_module(TRANSPORTS[name]).open_memory(group)
    return memory


def open_gpu_memory(name: str, group: Group, index: int) -> GpuMemory:
    """Memory of GPU ``index`` that all ranks of ``group`` reach. Collective.

    Raises: as ``open_memory``; ``PeerTimeout``: a rank did not come.
    """
    check_name(name)
    if name == AUTO:
        name = _choose_for_gpus(group)
    if name not in _ON_GPUS:
        raise TransportUnavailable(f"transport={name!r} has no memory on GPUs: use 'nvlink'")
    memory: GpuMemory = import_module(_ON_GPUS[name]).open_memory(group, index)
    return memory


def _choose_for_gpus(group: Group) -> str:
    processes = set(group.all_gather(process().encode()))
    name, why = "nvlink", "the ranks are processes on GPUs of one machine"
    if len(processes) == 1:
        name, why = "loopback", "the ranks are threads of one process"
    logger.info("rank %d: transport %r: %s", group.rank, name, why)
    return name


def __getattr__(name: str) -> Any:
    """``TransferEngine`` and ``EngineOptions``, imported where they are used: they need numba."""
    if name in ("EngineOptions", "TransferEngine"):
        return getattr(import_module("moecomm.transport.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
