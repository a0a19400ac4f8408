"""How bytes reach a peer. ``open_memory`` picks a backend by name and imports only that one.

Nothing here imports ``moecomm.kernels``; ``moecomm.comm`` joins the two.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

from moecomm.errors import ConfigError, TransportUnavailable

if TYPE_CHECKING:
    from moecomm.group import Group
    from moecomm.transport.base import Memory

logger = logging.getLogger(__name__)

# name → module with open_memory(group); None: planned, not part of this version
TRANSPORTS: Final[dict[str, str | None]] = {
    "loopback": "moecomm.transport.loopback",
    "nvlink": None,
    "nvshmem": None,
    "verbs": None,
    "efa": None,
}
AUTO: Final = "auto"


def check_name(name: object) -> None:
    """Raise ``ConfigError`` unless ``name`` is ``"auto"`` or a known transport."""
    if name != AUTO and name not in TRANSPORTS:
        known = ", ".join(map(repr, (AUTO, *TRANSPORTS)))
        raise ConfigError(f"transport={name!r}: must be one of {known}")


def open_memory(name: str, group: Group) -> Memory:
    """Memory that all ranks of ``group`` reach, by the transport ``name``.

    Raises:
        ConfigError: no transport has this name.
        TransportUnavailable: it cannot be used here.
    """
    check_name(name)
    if name == AUTO:
        name = _choose(group)
    module = TRANSPORTS[name]
    if module is None:
        raise TransportUnavailable(
            f"transport={name!r} is not part of this version; "
            f"available: {', '.join(repr(n) for n, m in TRANSPORTS.items() if m)}"
        )
    memory: Memory = import_module(module).open_memory(group)
    return memory


def _choose(group: Group) -> str:
    device = group.device or "cpu"
    if device.partition(":")[0] == "cuda":
        raise TransportUnavailable(
            "transport='auto': device='cuda' needs 'nvlink', which is not part of this version; "
            "device='cpu' runs the same kernels over 'loopback'"
        )
    logger.info(
        "rank %d: transport 'loopback': the ranks compute on the CPU, and it reaches every "
        "process of one machine",
        group.rank,
    )
    return "loopback"
