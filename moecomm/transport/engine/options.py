"""``EngineOptions``: sizes and times of an engine, with the rules that they follow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from moecomm.errors import ConfigError

_LIMITS: Final = {
    "tx_depth": (1, 1 << 16),
    "rx_depth": (1, 1 << 16),
    "commands": (64, 1 << 20),
    "operations": (16, 1 << 20),
    "program_operations": (0, 1 << 16),
    "message_bytes": (0, 1 << 20),
    "messages_per_peer": (1, 1024),
    "spin_turns": (0, 1 << 30),
    "yield_turns": (0, 1 << 30),
    "sleep_us": (0, 100_000),
}
_WINDOW: Final = 64  # arrivals per peer and NIC, where rx_depth is left open
_MOST_ARRIVALS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How large and how patient an engine is.

    Args:
        tx_depth: posts in flight per NIC, at most; a NIC may have fewer.
        rx_depth: arrivals that a NIC has room for, over all peers; at least one per peer.
            ``None``: 64 per peer, between 512 and 8192.
        commands: places in the submission ring; rounded up to a power of two.
        operations: writes and expectations of Python that may be open at once.
        program_operations: the same for a program.
        message_bytes: longest message of ``send``; 0: no messages.
        messages_per_peer: messages that a peer may send before one of them is received.
        timeout_s: a channel on which nothing moves for so long is given up.
        spin_turns, yield_turns, sleep_us: a worker with nothing to do spins for so many turns,
            then calls ``sched_yield`` for so many, then sleeps so long between turns.
        cpus: processors of the worker; ``None``: those of the GPU's NUMA node, where known.
    """

    tx_depth: int = 1024
    rx_depth: int | None = None
    commands: int = 4096
    operations: int = 4096
    program_operations: int = 256
    message_bytes: int = 4096
    messages_per_peer: int = 2
    timeout_s: float = 30.0
    spin_turns: int = 2000
    yield_turns: int = 20_000
    sleep_us: int = 50
    cpus: frozenset[int] | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if name == "rx_depth" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r}: must be an integer from {low} to {high}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: must be above 0")
        if self.cpus is not None and not self.cpus <= set(range(os.cpu_count() or 1)):
            raise ConfigError(f"cpus={sorted(self.cpus)}: this machine has {os.cpu_count()}")

    def arrivals(self, num_peers: int) -> int:
        """``rx_depth`` for so many peers.

        Raises:
            ConfigError: it is below ``num_peers``.
        """
        if self.rx_depth is None:
            return max(min(max(_WINDOW * num_peers, 512), _MOST_ARRIVALS), num_peers)
        if self.rx_depth < num_peers:
            raise ConfigError(
                f"rx_depth={self.rx_depth}: must be at least the number of ranks, {num_peers}"
            )
        return self.rx_depth


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is not below ``at_least``."""
    return 1 << max(at_least - 1, 0).bit_length()
