"""Which processors are near a GPU, from sysfs."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Final

from moecomm import cpus

logger = logging.getLogger(__name__)

SYSFS: Final = Path("/sys")


def cpus_near(pci_address: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """Processors of the NUMA node of the PCI device (``"0000:3b:00.0"``) that this process may
    use; empty when the system does not say, or allows none of them."""
    try:
        device = sysfs / "bus/pci/devices" / pci_address.lower()
        node = int((device / "numa_node").read_text())
        if node < 0:
            return frozenset()
        near = parse((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as error:
        logger.debug("the NUMA node of %s is not known: %s", pci_address, error)
        return frozenset()
    return near & cpus.allowed()


def parse(cpulist: str) -> frozenset[int]:
    """``"0-3,8"`` → {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def pci_address_of(cuda_device: int) -> str:
    """Where GPU ``cuda_device``, as this process numbers them, is on the PCI bus."""
    from moecomm.cuda_driver import call, device, driver

    raw = call(driver().cuDeviceGetPCIBusId, 64, device(cuda_device))
    text = raw if isinstance(raw, str) else bytes(raw).split(b"\0")[0].decode()
    return text.lower()


def nearest(devices: list[str], gpu: str, sysfs: Path = SYSFS) -> list[str]:
    """Those RDMA devices that share the most of the way from the root of the PCI tree with the
    GPU at address ``gpu``; all of them where sysfs does not tell.

    A device's name may have more behind that of sysfs: libfabric's ``rdmap16s27-rdm``.
    """
    try:
        target = (sysfs / "bus/pci/devices" / gpu.lower()).resolve(strict=True)
        known = sorted(path.name for path in (sysfs / "class/infiniband").iterdir())
    except OSError as error:
        logger.debug("the way to GPU %s is not known: %s", gpu, error)
        return devices
    shared = {}
    for device in devices:
        names = [name for name in known if device == name or device.startswith(f"{name}-")]
        if not names:
            return devices
        path = (sysfs / "class/infiniband" / names[-1] / "device").resolve()
        pairs = zip(path.parts, target.parts, strict=False)
        shared[device] = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))
    most = max(shared.values(), default=0)
    return [device for device in devices if shared[device] == most]
