"""What a test does to one rank's mover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moecomm.transport.engine import state as S
from moecomm.transport.proxy import state as P


def _stop_worker(comm: Any) -> None:
    """Its thread hangs."""
    comm._runtime._mover._engine._resources.worker._command(S.PAUSE)


def _forge_key(comm: Any) -> None:
    """Its next writes of bytes go where peers let nobody write."""
    mover = comm._runtime._mover
    first, count = mover._parts.offset("peers"), mover.num_ranks * mover._engine.num_nics
    for at in range(first, first + P.PEER_BYTES * count, P.PEER_BYTES):
        place = (at + P.PEER_BULK_KEY) // 8
        mover._block.words[place] ^= 0x55


FAULTS: dict[str, Callable[[Any], None]] = {"stop": _stop_worker, "forge": _forge_key}
