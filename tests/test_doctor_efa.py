"""The doctor on what an instance lacks for EFA."""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm.doctor import efa
from moecomm.doctor.efa import Efa
from moecomm.doctor.finding import Finding, State
from moecomm.doctor.libfabric import Copy, Libfabric

WITH_EFA = Libfabric((Copy("/x/libfabric.so.1", (2, 5), ("efa", "tcp")),))
WITHOUT = Libfabric((Copy("/y/libfabric.so.1", (1, 17), ("tcp",)),))


def machine(sysfs: Path, devices: dict[str, str], modules: tuple[str, ...], vendor: str) -> Path:
    for address, number in devices.items():
        folder = sysfs / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1d0f\n" if number.startswith("0xef") else "0x8086\n")
        (folder / "device").write_text(f"{number}\n")
    for module in modules:
        (sysfs / "module" / module).mkdir(parents=True)
    (sysfs / "class/dmi/id").mkdir(parents=True)
    (sysfs / "class/dmi/id/sys_vendor").write_text(f"{vendor}\n")
    return sysfs


def shown(findings: list[Finding]) -> dict[str, tuple[State, str, str]]:
    return {f.name: (f.state, f.detail, f.fix) for f in findings}


def test_a_machine_elsewhere_is_told_that_there_is_no_device(tmp_path: Path) -> None:
    found = efa.probe(machine(tmp_path, {"0000:00:01.0": "0x1234"}, (), "QEMU"))
    assert shown(efa.findings(found, WITH_EFA)) == {
        "device": (State.absent, "none on the PCI bus of this machine", "")
    }


def test_an_instance_without_the_interface_is_told_how_to_get_one(tmp_path: Path) -> None:
    found = efa.probe(machine(tmp_path, {}, (), "Amazon EC2"))
    state, detail, fix = shown(efa.findings(found, WITH_EFA))["device"]
    assert (state, detail) == (State.absent, "none on the PCI bus of this EC2 instance")
    assert fix == "start the instance with a network interface of type 'efa'"


def test_everything_there_is_said_so(tmp_path: Path) -> None:
    devices = {"0000:10:1b.0": "0xefa2", "0000:20:1b.0": "0xefa3"}
    found = efa.probe(machine(tmp_path, devices, ("efa", "nvidia_peermem"), "Amazon EC2"))
    lines = shown(efa.findings(found, WITH_EFA))
    assert all(state is State.ok for state, _, _ in lines.values()), lines
    assert lines["0000:10:1b.0"][1] == "third generation"
    assert "nvidia_peermem" in lines["GPU memory"][1]


@pytest.mark.parametrize(
    ("found", "libfabric", "name", "words"),
    [
        (Efa((("a", "0xefa2"),)), WITH_EFA, "driver", ("not loaded", "aws-efa-installer")),
        (Efa((("a", "0xefa2"),), True), WITHOUT, "provider", ("/y/libfabric.so.1", "libefa")),
        (Efa((("a", "0xefa2"),), True), Libfabric(), "provider", ("no libfabric found", "pip")),
        (Efa((("a", "0xefa1"),), True), WITH_EFA, "a", ("has no RDMA write", "p5en")),
    ],
)
def test_each_thing_that_is_missing_is_named(
    found: Efa, libfabric: Libfabric, name: str, words: tuple[str, str]
) -> None:
    state, detail, fix = shown(efa.findings(found, libfabric))[name]
    assert state is State.bad
    assert words[0] in detail
    assert words[1] in fix
