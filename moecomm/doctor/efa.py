"""What a machine lacks for AWS's EFA, in the order in which one would put it right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm.doctor.finding import Finding, absent, bad, ok
from moecomm.doctor.libfabric import INSTALL, Libfabric

TOPIC: Final = "EFA"
SYSFS: Final = Path("/sys")
_AMAZON: Final = "0x1d0f"
# PCI device → what its generation does. RDMA write is what the transfer engine needs.
_GENERATIONS: Final = {
    "0xefa0": ("first generation", False),
    "0xefa1": ("second generation", False),
    "0xefa2": ("third generation", True),
    "0xefa3": ("fourth generation", True),
}
_INSTALLER: Final = "install the EFA driver (aws-efa-installer), then load the module efa"
_PEER_MODULES: Final = ("nvidia_peermem", "efa_nv_peermem")


@dataclass(frozen=True, slots=True)
class Efa:
    """PCI devices by address and number; driver; modules that register GPU memory."""

    devices: tuple[tuple[str, str], ...] = ()
    driver: bool = False
    peer_modules: tuple[str, ...] = ()
    is_amazon: bool = False


def probe(sysfs: Path = SYSFS) -> Efa:
    """Read the PCI bus and the list of modules."""
    devices = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        number = _text(device / "device")
        if _text(device / "vendor") == _AMAZON and number.startswith("0xefa"):
            devices.append((device.name, number))
    modules = [name for name in _PEER_MODULES if (sysfs / "module" / name).exists()]
    maker = _text(sysfs / "class/dmi/id/sys_vendor")
    driver = (sysfs / "module/efa").exists()
    return Efa(tuple(devices), driver, tuple(modules), maker.startswith("Amazon"))


def findings(efa: Efa, libfabric: Libfabric) -> list[Finding]:
    """One line per thing that EFA needs; nothing but the first where there is no device."""
    if not efa.devices:
        fix = "start the instance with a network interface of type 'efa'" if efa.is_amazon else ""
        where = "this EC2 instance" if efa.is_amazon else "this machine"
        return [absent(TOPIC, "device", f"none on the PCI bus of {where}", fix)]
    found = [_device(address, number) for address, number in efa.devices]
    if efa.driver:
        found.append(ok(TOPIC, "driver", "module efa is loaded"))
    else:
        found.append(bad(TOPIC, "driver", "module efa is not loaded", _INSTALLER))
    copy = libfabric.with_provider("efa")
    if copy is not None:
        found.append(ok(TOPIC, "provider", f"{copy.path} opens it"))
    else:
        paths = ", ".join(copy.path for copy in libfabric.copies) or "no libfabric found"
        why = f"no libfabric opens the provider efa ({paths})"
        found.append(bad(TOPIC, "provider", why, f"{INSTALL}, and rdma-core with libefa.so.1"))
    if efa.peer_modules:
        found.append(ok(TOPIC, "GPU memory", f"module {efa.peer_modules[0]} is loaded"))
    else:
        detail = "by DMA-BUF alone: neither nvidia_peermem nor efa_nv_peermem is loaded"
        found.append(ok(TOPIC, "GPU memory", detail))
    return found


def _device(address: str, number: str) -> Finding:
    generation, writes = _GENERATIONS.get(number, (f"PCI device {number}", True))
    if writes:
        return ok(TOPIC, address, generation)
    detail = f"{generation}: has no RDMA write, which transport='efa' needs"
    return bad(TOPIC, address, detail, "use an instance type with RDMA write, such as p5 or p5en")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
