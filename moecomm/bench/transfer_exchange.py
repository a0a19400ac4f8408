"""What a rank exchanges with its peers, as C does it: see ``exchange`` in ``transfer_twin.cpp``."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

from moecomm.bench.transfer_sides import (
    PENDING,
    STUCK,
    Target,
    Twin,
    address_of,
    compile_twin,
    target_of,
    twin_of,
)
from moecomm.errors import TransportError
from moecomm.remote_words import Move
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.engine import TransferEngine


class _Part(C.Structure):
    _fields_ = [("target", Target), ("local", C.c_uint64), ("nbytes", C.c_uint64)]


class _Exchange(C.Structure):
    _fields_ = [
        ("twin", C.POINTER(Twin)), ("parts", C.POINTER(_Part)), ("n", C.c_int64),
        ("expected", C.c_int64), ("start", C.c_int64), ("begun", C.c_int64), ("end", C.c_int64),
        ("status", C.c_int64),
    ]  # fmt: skip


class Exchange:
    """Writes with an immediate, and as many to come.

    Args:
        engine: over libfabric, with one NIC.
        src: whose parts are written.
        moves: a write each: the peer's region, and which part goes where in it.
        expected: writes that come from peers.
        spin: idle polls before the processor is given up.
        patience_s: without any completion, after which it ends as an error.
    """

    def __init__(
        self,
        engine: TransferEngine,
        src: Region,
        moves: Sequence[tuple[RemoteRegion, Move]],
        expected: int,
        spin: int,
        patience_s: float = 5.0,
    ) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._twin = twin_of(engine, src, spin, patience_s)
        self._parts = (_Part * len(moves))()
        for n, (region, move) in enumerate(moves):
            target = target_of(engine, region.part(move.dst, move.nbytes))
            self._parts[n] = _Part(target, src.address + move.src, move.nbytes)
        parts = C.cast(self._parts, C.POINTER(_Part))
        self._state = _Exchange(C.pointer(self._twin), parts, len(moves), expected)
        self._library = compile_twin()
        engine.hold(self)  # the loop may run it as long as it runs at all

    @property
    def program(self) -> tuple[int, int]:
        """What the loop runs: the function and its state."""
        return address_of(self._library.exchange), C.addressof(self._state)

    def reset(self) -> None:
        """Before it becomes the loop's program."""
        state = self._state
        state.start = state.begun = state.end = 0
        state.status = PENDING

    def start(self, moment: int) -> None:
        """At this time of the monotonic clock, ns. What comes before is counted, too."""
        self._state.start = moment

    def is_over(self) -> bool:
        return bool(self._state.status != PENDING)

    def span(self) -> tuple[int, int]:
        """When it began, and when all that was expected had come.

        Raises:
            TransportError: it gave up, or a call failed.
        """
        if self._state.status != 0:
            why = f"call of libfabric failed ({self._state.status})"
            if self._state.status == STUCK:
                why = f"nothing completed for {self._patience_s:g} s"
            raise TransportError(
                f"rank {self._engine.rank} ({self._engine.transport}): an exchange by C: {why}; "
                f"{self._twin.sent} of {self._state.n} writes done, "
                f"{self._twin.came} of {self._state.expected} arrivals",
                operation="bench",
            )
        return self._state.begun, self._state.end
