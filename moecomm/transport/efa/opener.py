"""Interfaces that ``fi_getinfo`` shows, to be opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moecomm.errors import TransportUnavailable
from moecomm.transport.efa.endpoint import device_of
from moecomm.transport.efa.fabrics import Fabric
from moecomm.transport.efa.library import Library
from moecomm.transport.efa.nic import FabricNic
from moecomm.transport.engine.provider import Sizing


class FabricOpener:
    """See ``NicOpener``: one interface that ``fi_getinfo`` has shown."""

    def __init__(self, library: Library, fabric: Fabric, device: str) -> None:
        self.transport = fabric.name
        self.device = device
        self._library = library
        self._fabric = fabric

    def open(self, sizing: Sizing) -> FabricNic:
        """See ``NicOpener.open``."""
        on_gpu = sizing.cuda_device is not None and self._fabric.on_gpus
        code, infos = self._library.interfaces(self._fabric, on_gpu)
        matching = [info for info in infos if device_of(info) == self.device]
        chosen = matching[0] if matching else None
        for info in infos:
            if info != chosen:
                self._library.free(info)
        if chosen is None:
            raise TransportUnavailable(
                f"{self.device} ({self.transport}): not offered any more"
                f"{' with GPU memory' if on_gpu else ''}: {self._library.strerror(code)} ({code})"
            )
        return FabricNic(self._library, self._fabric, chosen, sizing)


def devices(infos: Sequence[int]) -> Iterator[str]:
    """Names of the interfaces, each once."""
    yield from dict.fromkeys(map(device_of, infos))
