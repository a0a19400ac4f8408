"""Which ranks are on one machine, and so reach each other's memory."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm import env
from moecomm.addresses import machine
from moecomm.group import DEFAULT_TIMEOUT_S, Group


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of each rank, numbered from 0 in the order of their first ranks; seen from
    ``rank``."""

    of_rank: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.of_rank) + 1

    @property
    def mates(self) -> list[int]:
        """Ranks of this rank's node, itself included."""
        return [r for r, node in enumerate(self.of_rank) if node == self.of_rank[self.rank]]

    @property
    def others(self) -> list[int]:
        """Ranks of the other nodes."""
        return [r for r, node in enumerate(self.of_rank) if node != self.of_rank[self.rank]]

    def __str__(self) -> str:
        return f"{len(self.of_rank)} ranks on {self.count} node{'s' * (self.count > 1)}"


def find_nodes(group: Group, timeout_s: float = DEFAULT_TIMEOUT_S) -> Nodes:
    """Ask every rank where it is. Collective.

    ``MOECOMM_NODE_SIZE`` cuts machines into smaller nodes. It never joins two machines.

    Raises:
        ConfigError: ``MOECOMM_NODE_SIZE`` is not a number from 1.
        PeerTimeout: a rank did not come.
    """
    size = env.integer("NODE_SIZE", 1) or group.size
    if group.simulation is not None:
        names = [b"%d" % (rank // size) for rank in range(group.size)]
    else:
        mine = f"{machine()} {group.rank // size}"
        names = group.all_gather(mine.encode(), timeout_s, "nodes")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Nodes(tuple(numbers[name] for name in names), group.rank)
