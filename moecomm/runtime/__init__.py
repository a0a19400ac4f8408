"""Devices that ``MoeComm`` runs on: each joins a transport's memory and the kernels' launches."""

from __future__ import annotations

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.group import Group
from moecomm.kernels.numba_jit.sources import Sources
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.runtime.base import Runtime
from moecomm.transport import AUTO, NETWORKS


def choose_transport(cfg: MoeConfig, group: Group, transport: str) -> str:
    """``"auto"`` stays itself where all ranks are on one machine; else it is a network.

    Collective, and equal on all ranks.
    """
    if transport != AUTO or group.size == 1:
        return transport
    from moecomm.runtime import proxied

    return proxied.choose_network(group, cfg.timeout_s)


def choose_remote(
    cfg: MoeConfig, group: Group, transport: str, device: str | None
) -> Remote | None:
    """How peers are served that kernels cannot load from and store to; ``None``: there are none.

    Collective, and equal on all ranks.

    Raises:
        TransportUnavailable: the transport does not work here.
    """
    kind, _, index = (device or group.device or "cpu").partition(":")
    if transport == "nvshmem" and kind == "cuda":
        from moecomm.runtime import nvshmem

        return nvshmem.choose(cfg, group, int(index) if index.isdigit() else None)
    if transport in NETWORKS:
        from moecomm.runtime import proxied

        return proxied.choose(cfg, group, transport, kind)
    return None


def open_runtime(
    layout: Layout, group: Group, transport: str, device: str | None, sources: Sources | None = None
) -> Runtime:
    """The runtime for ``device``; ``None``: the group's. ``sources``: kernels in Python.

    Raises:
        ConfigError: no such device or transport.
        TransportUnavailable: the transport does not work here.
    """
    if sources is not None and layout.areas is not None:
        raise ConfigError(
            "kernels in Python load from and store to their peers themselves; these peers are "
            f"remote (transport={transport!r})"
        )
    name = device or group.device or "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        from moecomm.runtime.cpu import CpuRuntime

        return CpuRuntime(layout, group, transport, sources)
    if kind == "cuda" and (not index or index.isdigit()):
        from moecomm.runtime.cuda import CudaRuntime

        number = int(index) if index else None
        return CudaRuntime(layout, group, transport, number, sources)
    raise ConfigError(f"device={name!r}: must be 'cpu', 'cuda' or 'cuda:N'")
