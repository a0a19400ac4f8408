"""RDMA devices and ports as the kernel shows them, the verbs library, and access rights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm.doctor.finding import Finding, absent, bad, ok

TOPIC: Final = "RDMA"
SYSFS: Final = Path("/sys/class")
DEVICES: Final = Path("/dev/infiniband")
INSTALL_VERBS: Final = "apt-get install libibverbs1 ibverbs-providers (or dnf install libibverbs)"
# What drives a device → what it is. Only ConnectX lets the GPU ring its doorbell (IBGDA).
_KINDS: Final = {"mlx5_core": "ConnectX", "efa": "AWS EFA", "rdma_rxe": "soft-RoCE"}


@dataclass(frozen=True, slots=True)
class Port:
    """One port: ``state`` as the kernel says it ("ACTIVE"), ``link`` "InfiniBand" or "Ethernet"."""

    number: int
    state: str
    link: str

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Device:
    """One RDMA device. ``node`` is its character device, ``refusal`` why that cannot be opened."""

    name: str
    kind: str
    ports: tuple[Port, ...]
    node: Path | None
    refusal: str | None

    @property
    def usable(self) -> bool:
        return self.refusal is None and any(port.active for port in self.ports)

    def __str__(self) -> str:
        ports = ", ".join(f"port {p.number} {p.state} ({p.link})" for p in self.ports)
        return f"{self.name} ({self.kind}): {ports or 'no ports'}"


@dataclass(frozen=True, slots=True)
class Rdma:
    """Devices, and why libibverbs does not load (``None``: it does)."""

    devices: tuple[Device, ...] = ()
    library_error: str | None = None

    @property
    def gpu_initiated(self) -> bool:
        """Whether a GPU can post to a device by itself (IBGDA): ConnectX only."""
        return any(device.usable and device.kind == "ConnectX" for device in self.devices)

    def why_not(self, kinds: tuple[str, ...] = ()) -> str | None:
        """Why no device (of ``kinds``, if given) can be used; ``None`` when one can."""
        wanted = [device for device in self.devices if not kinds or device.kind in kinds]
        if not wanted:
            others = "; ".join(map(str, self.devices))
            return f"no {' or '.join(kinds) or 'RDMA'} device" + (f", only {others}" * bool(others))
        if any(device.usable for device in wanted):
            return None
        refused = [f"{device.name}: {device.refusal}" for device in wanted if device.refusal]
        return "; ".join(["no port that can be used", *map(str, wanted), *refused])


def probe(
    sysfs: Path = SYSFS,
    devices: Path = DEVICES,
    load: Callable[[str], object] = ctypes.CDLL,
    can_open: Callable[[Path], str | None] | None = None,
) -> Rdma:
    """Read sysfs, and try to open the devices and to load the library."""
    opener = _can_open if can_open is None else can_open
    nodes = _nodes(sysfs / "infiniband_verbs", devices)
    names = _listing(sysfs / "infiniband")
    found = [_device(sysfs / "infiniband" / name, nodes.get(name), opener) for name in names]
    try:
        load("libibverbs.so.1")
    except OSError as error:
        return Rdma(tuple(found), str(error))
    return Rdma(tuple(found))


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _nodes(folder: Path, devices: Path) -> dict[str, Path]:
    """Device name → its character device (``uverbs0``)."""
    return {_text(folder / node / "ibdev"): devices / node for node in _listing(folder)}


def _device(folder: Path, node: Path | None, can_open: Callable[[Path], str | None]) -> Device:
    driver = folder / "device" / "driver"
    name = driver.resolve().name if driver.exists() else ""
    kind = _KINDS.get(name, name)
    if not kind:  # software devices have no driver link; soft-RoCE hangs below a network device
        kind = "soft-RoCE" if (folder / "parent").exists() else "unknown kind"
    ports = tuple(_port(folder / "ports" / n) for n in _listing(folder / "ports") if n.isdigit())
    refusal = "it has no device file" if node is None else can_open(node)
    return Device(folder.name, kind, ports, node, refusal)


def _port(folder: Path) -> Port:
    state = _text(folder / "state")  # "4: ACTIVE"
    return Port(int(folder.name), state.split(":")[-1].strip(), _text(folder / "link_layer"))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _can_open(node: Path) -> str | None:
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{node} cannot be opened for reading and writing ({error.strerror})"
    return None


def findings(rdma: Rdma) -> list[Finding]:
    found = []
    if rdma.library_error is None:
        found.append(ok(TOPIC, "libibverbs", "loads"))
    else:
        found.append(absent(TOPIC, "libibverbs", rdma.library_error, INSTALL_VERBS))
    if not rdma.devices:
        found.append(absent(TOPIC, "devices", "none: nothing in /sys/class/infiniband"))
    return found + [_finding(device) for device in rdma.devices]


def _finding(device: Device) -> Finding:
    if device.refusal is not None:
        fix = f"give this user read and write access to {device.node or DEVICES} (in a container: "
        fix += f"--device {DEVICES})"
        return bad(TOPIC, device.name, f"{device}; {device.refusal}", fix)
    if not any(port.active for port in device.ports):
        fix = "check the cable, the switch and the subnet manager, then `ibv_devinfo`"
        return bad(TOPIC, device.name, f"{device}: no active port", fix)
    return ok(TOPIC, device.name, str(device))
