"""The doctor on NICs that tests play, libfabric, and which transports follow from it all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_library
import pytest
from privileges import ordinary_folder
from test_doctor_gpu import H200, SLICE, TWO

from moecomm.doctor import foreign, jit, libfabric, rdma, transports
from moecomm.doctor.finding import Finding, State
from moecomm.doctor.foreign import Failure
from moecomm.doctor.gpus import Gpus
from moecomm.doctor.jit import Jit
from moecomm.doctor.libfabric import Libfabric
from moecomm.doctor.memory import Memory
from moecomm.doctor.nvshmem import Copy, Nvshmem
from moecomm.doctor.rdma import Device, Port, Rdma
from moecomm.doctor.transports import Machine, Verdict, conclude


def make_device(
    sysfs: Path, name: str, driver: str | None, states: tuple[str, ...], link: str = "InfiniBand"
) -> None:
    """An RDMA device as the kernel shows it; ``driver`` None: a software device."""
    folder = sysfs / "infiniband" / name
    number = len(list((sysfs / "infiniband").glob("*"))) if folder.parent.exists() else 0
    for port, state in enumerate(states, start=1):
        (folder / "ports" / str(port)).mkdir(parents=True)
        (folder / "ports" / str(port) / "state").write_text(f"{state}\n")
        (folder / "ports" / str(port) / "link_layer").write_text(f"{link}\n")
    if driver is None:
        (folder / "parent").write_text("eth0\n")
    else:
        (sysfs / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "device").mkdir()
        (folder / "device" / "driver").symlink_to(sysfs / "drivers" / driver)
    node = sysfs / "infiniband_verbs" / f"uverbs{number}"
    node.mkdir(parents=True)
    (node / "ibdev").write_text(f"{name}\n")


def probe(sysfs: Path, **changes: Any) -> Rdma:
    arguments: dict[str, Any] = {
        "devices": Path("/dev/infiniband"),
        "load": lambda name: None,
        "can_open": lambda node: None,
    }
    return rdma.probe(sysfs, **{**arguments, **changes})


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {found.name: found for found in findings}


# RDMA devices


def test_devices_and_ports(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", "mlx5_core", ("4: ACTIVE", "1: DOWN"))
    make_device(tmp_path, "rdmap0s6", "efa", ("4: ACTIVE",), "Unspecified")
    make_device(tmp_path, "rxe0", None, ("4: ACTIVE",), "Ethernet")
    probed = probe(tmp_path)
    assert probed.devices == (
        Device(
            "mlx5_0",
            "ConnectX",
            (Port(1, "ACTIVE", "InfiniBand"), Port(2, "DOWN", "InfiniBand")),
            Path("/dev/infiniband/uverbs0"),
            None,
        ),
        Device(
            "rdmap0s6",
            "AWS EFA",
            (Port(1, "ACTIVE", "Unspecified"),),
            Path("/dev/infiniband/uverbs1"),
            None,
        ),
        Device(
            "rxe0",
            "soft-RoCE",
            (Port(1, "ACTIVE", "Ethernet"),),
            Path("/dev/infiniband/uverbs2"),
            None,
        ),
    )
    assert {found.state for found in rdma.findings(probed)} == {State.ok}
    assert probed.gpu_initiated
    assert probed.why_not() is None


def test_no_device_and_no_library(tmp_path: Path) -> None:
    """F05: no /dev/infiniband at all."""

    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    probed = probe(tmp_path, load=load)
    found = by_name(rdma.findings(probed))
    assert found["libibverbs"].state is found["devices"].state is State.absent
    assert "libibverbs1" in found["libibverbs"].fix
    assert probed.why_not() == "no RDMA device"


def test_no_active_port_lists_devices_and_states(tmp_path: Path) -> None:
    """F05: port down."""
    make_device(tmp_path, "mlx5_0", "mlx5_core", ("1: DOWN",))
    make_device(tmp_path, "mlx5_1", "mlx5_core", ("2: INIT", "1: DOWN"))
    probed = probe(tmp_path)
    why = probed.why_not() or ""
    assert "mlx5_0 (ConnectX): port 1 DOWN (InfiniBand)" in why
    assert "mlx5_1 (ConnectX): port 1 INIT (InfiniBand), port 2 DOWN (InfiniBand)" in why
    assert by_name(rdma.findings(probed))["mlx5_0"].state is State.bad
    assert not probed.gpu_initiated


def test_device_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """F10: the message says which permission."""
    make_device(tmp_path, "mlx5_0", "mlx5_core", ("4: ACTIVE",))
    absent = probe(tmp_path, devices=tmp_path / "dev", can_open=None)
    assert "No such file" in (absent.why_not() or "")
    with ordinary_folder() as devices:
        node = devices / "uverbs0"
        node.touch(0o400)
        reason = rdma._can_open(node)
    assert reason == f"{node} cannot be opened for reading and writing (Permission denied)"
    refused = probe(tmp_path, devices=devices, can_open=lambda node: reason)
    found = by_name(rdma.findings(refused))["mlx5_0"]
    assert found.state is State.bad
    assert reason in found.detail
    assert f"read and write access to {node}" in found.fix


def test_device_without_a_device_file(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", "mlx5_core", ("4: ACTIVE",))
    (tmp_path / "infiniband_verbs" / "uverbs0" / "ibdev").write_text("other\n")
    assert probe(tmp_path).devices[0].refusal == "it has no device file"


@pytest.mark.parametrize(("driver", "kind"), [("bnxt_re", "bnxt_re"), ("irdma", "irdma")])
def test_other_nics_cannot_be_rung_by_the_gpu(driver: str, kind: str, tmp_path: Path) -> None:
    """F06."""
    make_device(tmp_path, "nic0", driver, ("4: ACTIVE",))
    probed = probe(tmp_path)
    assert probed.devices[0].kind == kind
    assert probed.why_not() is None
    assert not probed.gpu_initiated


# libfabric


def test_providers_of_a_library(tmp_path: Path) -> None:
    library = fake_library.build(tmp_path / "libfabric.so.1", fake_library.FABRIC, BEHAVIOUR="")
    probed = libfabric.probe([str(tmp_path / "absent.so.1"), str(library)])
    [copy] = probed.copies
    assert copy == libfabric.Copy(str(library), (1, 17), ("tcp;ofi_rxm", "efa"))
    assert probed.with_provider("efa") == copy
    assert probed.with_provider("tcp") is None
    [found] = libfabric.findings(probed)
    assert f"1.17 ({library}), providers: tcp;ofi_rxm, efa" in found.detail


@pytest.mark.parametrize(
    ("behaviour", "why"), [("abort();", "signal 6"), ("return -61;", None)], ids=["crash", "none"]
)
def test_library_that_crashes_or_has_nothing(
    behaviour: str, why: str | None, tmp_path: Path
) -> None:
    source = fake_library.FABRIC
    library = fake_library.build(tmp_path / "libfabric.so.1", source, BEHAVIOUR=behaviour)
    [copy] = libfabric.probe([str(library)]).copies
    assert copy.providers == ()
    assert (copy.error is None) == (why is None)
    assert why is None or why in (copy.error or "")
    [found] = libfabric.findings(Libfabric((copy,)))
    assert (found.state is State.bad) == (why is not None)


def test_system_library_that_is_not_there() -> None:
    assert libfabric.probe(["libno_such_fabric.so.1"]).copies == ()
    [found] = libfabric.findings(Libfabric())
    assert found.fix == 'pip install "moecomm[efa]"'
    broken = libfabric.probe(["libfabric.so.1"], lambda *a: Failure("undefined symbol"))
    assert libfabric.findings(broken)[0].state is State.bad
    assert isinstance(foreign.ask("libfabric", "/dev/null"), Failure)


# Conclusions

WHOLE = Copy(Path("/nv"), (), (3, 4, 5), (3, 4, 5), ("sm_90",))
CONNECTX = Device("mlx5_0", "ConnectX", (Port(1, "ACTIVE", "InfiniBand"),), Path("/dev/u0"), None)
EFA = replace(CONNECTX, name="rdmap0s6", kind="AWS EFA")
BIG = Machine(
    memory=Memory(locked=None, shared="memfd"),
    gpus=TWO,
    jit=jit.probe(),
    nvshmem=Nvshmem((WHOLE,)),
    rdma=Rdma((CONNECTX,)),
    libfabric=Libfabric((libfabric.Copy("/l", (2, 5), ("efa", "tcp")),)),
)


def verdicts(machine: Machine) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in conclude(machine, lambda name: True)}


def test_machine_that_has_everything() -> None:
    found = verdicts(BIG)
    assert all(verdict.usable for verdict in found.values())
    assert "IBGDA" in found["nvshmem"].why
    assert "mlx5_0 (ConnectX): port 1 ACTIVE" in found["verbs"].why
    assert "provider efa" in found["efa"].why


def test_machine_that_has_nothing() -> None:
    nothing = Machine(
        Memory(shared="memfd"),
        Gpus(),
        Jit(None, "no toolchain"),
        Nvshmem(),
        Rdma((), "libibverbs.so.1: not found"),
        Libfabric(),
    )
    found = verdicts(nothing)
    assert [name for name, verdict in found.items() if verdict.usable] == ["loopback"]
    assert found["nvlink"].why == "no NVIDIA driver"
    assert "(libibverbs.so.1: not found); no ConnectX" in found["verbs"].why
    assert "no libfabric" in found["efa"].why


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        ({"memory": Memory(refusal="blocked", shared="")}, "loopback", "blocked"),
        ({"memory": Memory(locked=64 << 10, shared="memfd")}, "verbs", "locked memory is 64 KiB"),
        ({"memory": Memory(locked=64 << 10, shared="memfd")}, "efa", "locked memory is 64 KiB"),
        ({"jit": Jit(None, "NVRTC is missing")}, "nvlink", "NVRTC is missing"),
        ({"gpus": replace(TWO, devices=(SLICE,) * 2)}, "nvlink", "MIG"),
        ({"gpus": replace(TWO, closed_pairs=((0, 1),))}, "nvlink", "0→1"),
        (
            {"gpus": replace(TWO, devices=(replace(H200, fabric="not started"),))},
            "nvlink",
            "'not started'",
        ),
        ({"gpus": Gpus(error="crashed with signal 11")}, "nvshmem", "crashed with signal 11"),
        ({"nvshmem": Nvshmem()}, "nvshmem", "no whole copy"),
        ({"nvshmem": Nvshmem((replace(WHOLE, host=(3, 6, 5)),))}, "nvshmem", "3.6.5"),
        ({"nvshmem": Nvshmem((replace(WHOLE, archs=("sm_80",)),))}, "nvshmem", "no code for sm_90"),
        ({"rdma": Rdma((EFA,))}, "verbs", "no ConnectX or soft-RoCE device, only rdmap0s6"),
        (
            {"rdma": Rdma((replace(CONNECTX, ports=(Port(1, "DOWN", "InfiniBand"),)),))},
            "verbs",
            "port 1 DOWN",
        ),
        ({"rdma": Rdma((replace(CONNECTX, refusal="no rights"),))}, "verbs", "no rights"),
        ({"libfabric": Libfabric((libfabric.Copy("/l", (1, 17), ("udp",)),))}, "efa", "efa or tcp"),
    ],
)
def test_what_takes_a_transport_away(change: dict[str, Any], name: str, why: str) -> None:
    found = verdicts(replace(BIG, **change))[name]
    assert not found.usable
    assert why in found.why


def test_nvshmem_between_nodes() -> None:
    """F06: without a ConnectX the proxy is chosen, and said."""
    other = verdicts(replace(BIG, rdma=Rdma((EFA,))))["nvshmem"]
    assert other.usable
    assert "CPU proxy" in other.why
    alone = verdicts(replace(BIG, rdma=Rdma()))["nvshmem"]
    assert alone.usable
    assert "inside this machine only" in alone.why


def test_one_gpu_and_tcp_stand_in() -> None:
    one = replace(
        BIG,
        gpus=replace(TWO, devices=(H200,)),
        libfabric=Libfabric((libfabric.Copy("/l", (2, 5), ("tcp",)),)),
    )
    found = verdicts(one)
    assert "several ranks share it" in found["nvlink"].why
    assert found["efa"].usable
    assert found["efa"].why.startswith("for tests, over provider tcp of /l: no AWS EFA device")


def test_transport_that_this_version_lacks() -> None:
    [*_, efa] = conclude(BIG, lambda name: name != "efa")
    assert not efa.usable
    assert efa.why.startswith("not in this version of moecomm (this machine: provider efa")
    assert not transports.has_module("no_such_transport")
