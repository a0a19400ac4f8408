"""Which kernels a communicator runs: the CUDA C++ ones, or Python files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from moecomm import env
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.kernels.numba_jit.sources import Sources, read

Kernels = str | os.PathLike[str]


def named(kernels: Kernels) -> str:
    """``kernels`` as text; ``"auto"``: MOECOMM_KERNELS, or else ``"cuda"``."""
    text = os.fspath(kernels)
    return (env.get("KERNELS") or "cuda") if text == "auto" else text


def identity(kernels: Kernels) -> str:
    """Text that must be equal on all ranks: it changes with the text of Python files."""
    text = named(kernels)
    if text == "cuda":
        return text
    try:
        sources = choose(text)
    except ConfigError as error:
        return str(error)
    return text if sources is None else f"Python files {sources.digest()[:16]}"


def choose(kernels: Kernels) -> Sources | None:
    """The Python files of ``"numba"``, or of the user's file or folder over them; ``None``: the
    kernels are CUDA C++.

    Raises:
        ConfigError: neither a name that is known nor a path, or a file says what a kernel cannot.
    """
    text = named(kernels)
    if text == "cuda":
        return None
    if text == "numba":
        return read()
    if text.endswith(".py") or os.sep in text or Path(text).exists():
        return read(Path(text))
    raise ConfigError(
        f"kernels={text!r}: must be 'auto', 'cuda', 'numba', or the path of a Python file of "
        "kernels or of a folder of them"
    )


def fitting(cfg: MoeConfig, sources: Sources | None) -> MoeConfig:
    """``cfg`` as these kernels take it: those in Python have the ``flags`` wire, and no codecs.

    Raises:
        ConfigError: it asks for more.
    """
    if sources is None:
        return cfg
    if cfg.coded is not None:
        raise ConfigError(f"codec={cfg.coded.name!r}: kernels in Python call no codecs")
    if cfg.wire == "flags":
        return cfg
    if cfg.wire == "lines":
        raise ConfigError("wire='lines': kernels in Python have wire='flags' only")
    return dataclasses.replace(cfg, wire="flags")
