"""How badly the loopback transport behaves: what real networks do, on purpose and repeatably."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moecomm.errors import ConfigError

QUEUE_DEPTH: Final = 256


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the network is. The same seed on a rank gives it the same choices.

    Args:
        seed: of all random choices.
        delay: seconds between posting and arrival, at most (uniform); or such a limit per peer,
            where a peer that is not named has none.
        reorder: deliver what is due in random order. Without it, writes to one peer stay in order.
        drop: probability that a write is lost. Its sender is told that it was sent: the receiver
            waits in vain, which is the point.
        duplicate: probability that an immediate is delivered twice. Receivers count it once, as
            reliable transports do.
        dead_ranks: writes to them fail; they themselves send nothing.
        queue_depth: writes that may be under way at once; further ones wait their turn.
    """

    seed: int = 0
    delay: float | Mapping[int, float] = 0.0
    reorder: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    dead_ranks: frozenset[int] = frozenset()
    queue_depth: int = QUEUE_DEPTH

    def __post_init__(self) -> None:
        delays = [self.delay] if isinstance(self.delay, int | float) else self.delay.values()
        if not all(d >= 0 for d in delays):
            raise ConfigError(f"delay={self.delay!r}: must be seconds, not below 0")
        for name in ("drop", "duplicate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be from 0 to 1")
        if self.queue_depth < 1:
            raise ConfigError(f"queue_depth={self.queue_depth}: must be at least 1")

    def delay_to(self, rank: int) -> float:
        """Seconds that a write to ``rank`` may take."""
        if isinstance(self.delay, int | float):
            return float(self.delay)
        return float(self.delay.get(rank, 0.0))
