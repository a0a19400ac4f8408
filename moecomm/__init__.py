"""Mixture-of-Experts dispatch and combine for expert-parallel models.

>>> import moecomm as mc
>>> cfg = mc.MoeConfig(num_experts=8, top_k=2, hidden=64, max_tokens=16)

``mc.run(fn, num_ranks)`` starts local ranks, each of which builds a ``mc.MoeComm(cfg, group)``.
Importing the package needs numpy alone; everything else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moecomm import codecs, reference
    from moecomm.codecs import Codec, codec
    from moecomm.comm import MoeComm
    from moecomm.config import MoeConfig
    from moecomm.errors import (
        CodecError,
        CompileError,
        ConfigError,
        DtypeError,
        MoecommError,
        OutOfMemory,
        Overflow,
        PeerTimeout,
        StateError,
        TransportError,
        TransportUnavailable,
    )
    from moecomm.group import Group
    from moecomm.handle import Handle, Received
    from moecomm.layout import Layout
    from moecomm.run import run
    from moecomm.stats import Stats

_ERRORS = (
    "CodecError", "CompileError", "ConfigError", "DtypeError", "MoecommError", "OutOfMemory",
    "Overflow", "PeerTimeout", "StateError", "TransportError", "TransportUnavailable",
)  # fmt: skip
_MODULES = ("codecs", "reference")
_HOME = {
    "Codec": "codecs",
    "codec": "codecs",
    "Group": "group",
    "Handle": "handle",
    "Layout": "layout",
    "MoeComm": "comm",
    "MoeConfig": "config",
    "Received": "handle",
    "Stats": "stats",
    "run": "run",
    **dict.fromkeys(_ERRORS, "errors"),
}

__all__ = [
    "Codec",
    "CodecError",
    "CompileError",
    "ConfigError",
    "DtypeError",
    "Group",
    "Handle",
    "Layout",
    "MoeComm",
    "MoeConfig",
    "MoecommError",
    "OutOfMemory",
    "Overflow",
    "PeerTimeout",
    "Received",
    "StateError",
    "Stats",
    "TransportError",
    "TransportUnavailable",
    "__version__",
    "codec",
    "codecs",
    "reference",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"moecomm.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'moecomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moecomm.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """``moecomm.run`` is the function, whoever imports the module of that name first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "run" and isinstance(value, ModuleType):
            return  # what the import system does after loading a submodule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
