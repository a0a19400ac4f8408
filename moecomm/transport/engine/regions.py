"""Registered memory: this rank's, found by address, and peers', read from their keys.

The key of a ``RemoteRegion`` is the first address and the size of what was registered, then for
every NIC the base that stands for its first byte and the remote key. The bounds travel with it, so
that a write outside is refused here, before the target's NIC would.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from moecomm.errors import ConfigError
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.engine.provider import Registration

_HEAD: Final = struct.Struct("!QQ")
_NIC: Final = struct.Struct("!QQ")
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Registered:
    """One region of this rank and what each NIC calls it."""

    region: Region
    nics: tuple[Registration, ...]

    def holds(self, region: Region) -> bool:
        """Whether ``region`` lies inside."""
        offset = region.address - self.region.address
        return 0 <= offset <= self.region.nbytes - region.nbytes


class Regions:
    """This rank's registrations."""

    def __init__(self) -> None:
        self._all: list[Registered] = []

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._all)

    def add(self, region: Region, nics: Sequence[Registration]) -> Registered:
        """Remember a registration; the newest is found first."""
        registered = Registered(region, tuple(nics))
        self._all.insert(0, registered)
        return registered

    def remove(self, registered: Registered) -> None:
        """Forget it."""
        self._all.remove(registered)

    def find(self, region: Region, name: str = "src") -> Registered:
        """The registration that ``region`` lies in.

        Raises:
            ConfigError: there is none.
        """
        for registered in self._all:
            if registered.holds(region):
                return registered
        raise ConfigError(
            f"{name}={region}: must lie in memory that allocate returned or register was given"
        )


def to_remote(rank: int, registered: Registered) -> RemoteRegion:
    """What peers need to write to it."""
    region = registered.region
    key = _HEAD.pack(region.address, region.nbytes)
    for nic in registered.nics:
        key += _NIC.pack(nic.remote_base & _MASK, nic.remote_key & _MASK)
    return RemoteRegion(rank, region.address, region.nbytes, key)


@lru_cache(maxsize=4096)
def parse(key: bytes, num_nics: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """First address, size and (base, key) per NIC of a ``RemoteRegion``'s key.

    Raises:
        ConfigError: it is not of an engine with so many NICs.
    """
    if len(key) != _HEAD.size + num_nics * _NIC.size:
        raise ConfigError(
            f"dst: its key has {len(key)} bytes; must come from register of an engine with "
            f"{num_nics} NICs"
        )
    address, nbytes = _HEAD.unpack_from(key)
    places = tuple(
        _NIC.unpack_from(key, _HEAD.size + index * _NIC.size) for index in range(num_nics)
    )
    return address, nbytes, places


def resolve(dst: RemoteRegion, num_nics: int) -> tuple[tuple[int, int], ...]:
    """(POST_REMOTE, POST_REMOTE_KEY) of ``dst`` for every NIC.

    Raises:
        ConfigError: it does not lie in what was registered.
    """
    start, nbytes, places = parse(dst.key, num_nics)
    offset = dst.address - start
    if offset < 0 or offset + dst.nbytes > nbytes:
        raise ConfigError(
            f"dst: {dst.nbytes} bytes at {dst.address:#x} of rank {dst.rank}; must lie in the "
            f"{nbytes} bytes registered at {start:#x}"
        )
    return tuple((base + offset & _MASK, key) for base, key in places)
