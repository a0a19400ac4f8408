"""TransferEngine: one-sided writes over several NICs, driven by one thread per GPU.

``TransferEngine`` and ``EngineOptions`` are for callers, ``provider`` for those who add a kind of
network interface, ``program`` for code that runs inside the loop. Importing this module compiles
nothing; making an engine does, once per machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm.transport.engine.options import EngineOptions

if TYPE_CHECKING:
    from moecomm.transport.engine.engine import TransferEngine

__all__ = ["EngineOptions", "TransferEngine"]


def __getattr__(name: str) -> Any:
    if name == "TransferEngine":
        from moecomm.transport.engine.engine import TransferEngine

        return TransferEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
