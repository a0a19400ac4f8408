"""Devices that ``MoeComm`` runs on: each joins a transport's memory and the kernels' launches."""

from __future__ import annotations

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.group import Group
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.runtime.base import Runtime


def choose_kernels(kernels: str) -> str:
    """``"auto"`` is the CUDA C++ kernels."""
    if kernels not in ("auto", "cuda", "numba"):
        raise ConfigError(f"kernels={kernels!r}: must be 'auto', 'cuda' or 'numba'")
    if kernels == "numba":
        raise TransportUnavailable(
            "kernels='numba': this version has no numba kernels yet; use kernels='cuda'"
        )
    return "cuda"


def choose_remote(cfg: MoeConfig, group: Group, transport: str) -> Remote | None:
    """How peers are served that kernels cannot load from and store to; ``None``: there are none.

    Collective, and equal on all ranks."""
    return None


def open_runtime(layout: Layout, group: Group, transport: str, device: str | None) -> Runtime:
    """The runtime for ``device``; ``None``: the group's.

    Raises:
        ConfigError: no such device or transport.
        TransportUnavailable: the transport does not work here.
    """
    name = device or group.device or "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        from moecomm.runtime.cpu import CpuRuntime

        return CpuRuntime(layout, group, transport)
    if kind == "cuda" and (not index or index.isdigit()):
        from moecomm.runtime.cuda import CudaRuntime

        return CudaRuntime(layout, group, transport, int(index) if index else None)
    raise ConfigError(f"device={name!r}: must be 'cpu', 'cuda' or 'cuda:N'")
