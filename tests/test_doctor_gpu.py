"""The doctor on GPUs and NVSHMEM that tests play: drivers, MIG, peers, fabric, half copies."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_library
import pytest

from moecomm.doctor import foreign, gpus, nvshmem
from moecomm.doctor.finding import Finding, State
from moecomm.doctor.foreign import Failure
from moecomm.doctor.gpus import Gpu, Gpus

H200 = Gpu(
    name="NVIDIA H200",
    arch="sm_90",
    memory=141 << 30,
    multiprocessors=132,
    posix_handles=True,
    rdma=True,
    fabric="completed",
)
SLICE = replace(H200, name="NVIDIA H200 MIG 1g.18gb", fabric=None)
TWO = Gpus(cuda=(13, 0), driver="580.159.04", devices=(H200, H200))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {found.name: found for found in findings}


# The driver, through a library that plays it


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return folder


def test_driver_is_asked_through_ctypes(libraries: Path) -> None:
    fake_library.build(libraries / "libcuda.so.1", fake_library.CUDA, INIT="return 0;")
    fake_library.build(libraries / "libnvidia-ml.so.1", fake_library.NVML)
    probed = gpus.probe()
    assert probed.error is None
    assert probed.cuda == (13, 0)
    assert probed.devices == (
        Gpu("Fake A", "sm_90", 141 << 30, 132, True, False, "in progress"),
        Gpu("Fake B", "sm_90", 141 << 30, 132, True, False, "in progress"),
    )
    assert probed.closed_pairs == ((1, 0),)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 802;", "CUDA_ERROR_SYSTEM_NOT_READY"),
        ("abort();", "crashed with signal 6"),
        ("sleep(60); return 0;", "no answer within 1 s"),
    ],
    ids=["error", "crash", "hang"],
)
def test_sick_driver_does_not_take_the_doctor_along(libraries: Path, body: str, why: str) -> None:
    fake_library.build(libraries / "libcuda.so.1", fake_library.CUDA, INIT=body)
    timeout_s = 1.0 if "sleep" in body else 30.0
    probed = gpus.probe(lambda question: foreign.ask(question, timeout_s=timeout_s))
    assert why in (probed.error or "")
    [found] = gpus.findings(probed)
    assert found.state is State.bad
    assert why in found.detail
    assert why in (gpus.can_launch(probed) or "")


# What is made of the answers


def test_two_gpus_that_reach_each_other() -> None:
    found = by_name(gpus.findings(TWO))
    assert {f.state for f in found.values()} == {State.ok}
    assert "580.159.04, CUDA 13.0" in found["driver"].detail
    assert "sm_90, 141 GiB, 132 SMs, fabric completed" in found["GPU 1"].detail
    assert "reach each other" in found["peer access"].detail
    assert gpus.can_launch(TWO) is None
    assert gpus.can_use_peers(TWO) is None


def test_no_driver_and_no_gpu() -> None:
    nothing = gpus.probe(lambda question: {})
    assert [f.state for f in gpus.findings(nothing)] == [State.absent]
    assert gpus.can_launch(nothing) == "no NVIDIA driver"
    hidden = Gpus(cuda=(13, 0))
    assert "shows no GPU" in by_name(gpus.findings(hidden))["devices"].detail
    assert gpus.can_launch(hidden) == "no GPU"


def test_old_driver_and_old_gpu() -> None:
    old = replace(TWO, cuda=(12, 4))
    assert by_name(gpus.findings(old))["driver"].state is State.bad
    assert "13.0 is needed" in (gpus.can_launch(old) or "")
    turing = replace(TWO, devices=(replace(H200, arch="sm_75"),))
    assert by_name(gpus.findings(turing))["GPU 0"].state is State.bad
    assert "older than sm_80" in (gpus.can_launch(turing) or "")


def test_mig_slices() -> None:
    """F04: the message names MIG."""
    slices = replace(TWO, devices=(SLICE, SLICE), closed_pairs=((0, 1), (1, 0)))
    found = by_name(gpus.findings(slices))
    assert "MIG slice" in found["GPU 0"].detail
    assert "not between MIG slices: 0→1, 1→0" in found["peer access"].detail
    assert "MIG slice" in (gpus.can_use_peers(slices) or "")
    assert not H200.is_mig
    assert SLICE.is_mig


def test_pairs_without_peer_access_are_listed() -> None:
    """F01."""
    partial = replace(TWO, devices=(H200,) * 4, closed_pairs=((0, 3), (3, 0)))
    assert "0→3, 3→0" in by_name(gpus.findings(partial))["peer access"].detail
    assert gpus.can_use_peers(partial) == "no peer access between GPUs 0→3, 3→0"


@pytest.mark.parametrize("state", ["not started", "in progress"])
def test_fabric_that_is_not_up(state: str) -> None:
    """F15: the fabric's state is named, before anything is mapped."""
    sick = replace(TWO, devices=(H200, replace(H200, fabric=state)))
    found = by_name(gpus.findings(sick))["GPU 1"]
    assert found.state is State.bad
    assert f"fabric {state}" in found.detail
    assert "fabricmanager" in found.fix
    assert gpus.can_use_peers(sick) == f"the NVLink fabric of GPU 1 is {state!r}, not 'completed'"


def test_fabric_manager_that_is_down() -> None:
    """F15, as cuInit reports it."""
    answer = {"error": "CUDA_ERROR_SYSTEM_NOT_READY", "code": 802}
    [found] = gpus.findings(gpus.probe(lambda question: answer))
    assert "NVLink fabric is not up" in found.detail
    assert found.fix == "systemctl start nvidia-fabricmanager (as root)"


@pytest.mark.parametrize("fabric", [None, "not supported", "completed"])
def test_fabric_states_that_are_fine(fabric: str | None) -> None:
    assert gpus.can_use_peers(replace(TWO, devices=(replace(H200, fabric=fabric),))) is None


def test_gpu_that_cannot_export_memory() -> None:
    odd = replace(TWO, devices=(replace(H200, posix_handles=False),))
    assert "file descriptors" in (gpus.can_use_peers(odd) or "")


# NVSHMEM

HEADER = "".join(
    f"#define NVSHMEM_VENDOR_{part}_VERSION {value}\n"
    for part, value in (("MAJOR", 3), ("MINOR", 4), ("PATCH", 5))
)


def make_copy(root: Path, *, archs: tuple[int, ...] = (80, 90, 100)) -> Path:
    """A directory that looks like NVSHMEM 3.4.5; its host library is not one that loads."""
    for folder in ("lib", "include/non_abi"):
        (root / folder).mkdir(parents=True)
    (root / "lib" / "libnvshmem_host.so.3").write_bytes(b"host")
    (root / "lib" / "libnvshmem_device.a").write_bytes(fake_library.fat_binary(*archs))
    (root / "include" / "non_abi" / "nvshmem_version.h").write_text(HEADER)
    return root


def ask_345(question: str, library: str) -> Any:
    return [3, 4, 5]


def test_whole_copy(tmp_path: Path) -> None:
    root = make_copy(tmp_path / "nvshmem")
    probed = nvshmem.probe({}, [root], ask_345)
    assert probed.chosen is not None
    assert probed.chosen.archs == ("sm_80", "sm_90", "sm_100")
    [found] = nvshmem.findings(probed, ["sm_90"])
    assert found.state is State.ok
    assert f"3.4.5 in {root}, for sm_80, sm_90, sm_100" in found.detail


@pytest.mark.parametrize(
    "part",
    [
        "lib/libnvshmem_host.so.3",
        "lib/libnvshmem_device.a",
        "include/non_abi/nvshmem_version.h",
    ],
)
def test_half_copy_is_rejected(part: str, tmp_path: Path) -> None:
    """G10: a half copy that is found first does not hide the whole one."""
    decoy, whole = make_copy(tmp_path / "decoy"), make_copy(tmp_path / "whole")
    (decoy / part).unlink()
    probed = nvshmem.probe({}, [decoy, whole], ask_345)
    assert probed.chosen is not None
    assert probed.chosen.root == whole
    rejected, used = nvshmem.findings(probed)
    assert rejected.state is State.bad
    assert f"{decoy} is not used: lacks" in rejected.detail
    assert Path(part).name in rejected.detail
    assert used.state is State.ok


@pytest.mark.parametrize("decoy", ["empty", "headers without a version", "archive without code"])
def test_decoy_is_rejected(decoy: str, tmp_path: Path) -> None:
    """G10."""
    root = tmp_path / "nvshmem"
    if decoy == "empty":
        root.mkdir()
    else:
        make_copy(root)
    if decoy == "headers without a version":
        (root / "include/non_abi/nvshmem_version.h").write_text("#define OTHER 1\n")
    if decoy == "archive without code":
        (root / "lib/libnvshmem_device.a").write_bytes(b"!<arch>\n")
    probed = nvshmem.probe({}, [root], ask_345)
    assert probed.chosen is None
    rejected, missing = nvshmem.findings(probed)
    assert str(root) in rejected.detail
    assert missing.state is State.absent
    assert missing.fix == 'pip install "moecomm[nvshmem]"'


def test_host_library_that_does_not_load(tmp_path: Path) -> None:
    root = make_copy(tmp_path / "nvshmem")
    probed = nvshmem.probe({}, [root], foreign.ask)
    assert probed.chosen is None
    assert "libnvshmem_host.so.3" in nvshmem.findings(probed)[0].detail


def test_versions_of_the_halves_differ(tmp_path: Path) -> None:
    """F14: both versions and both paths."""
    root = make_copy(tmp_path / "nvshmem")
    probed = nvshmem.probe({}, [root], lambda question, library: [3, 6, 5])
    found = by_name(nvshmem.findings(probed))["versions"]
    assert found.state is State.bad
    assert f"device code 3.4.5 ({root}/lib/libnvshmem_device.a)" in found.detail
    assert f"host library 3.6.5 ({root}/lib/libnvshmem_host.so.3)" in found.detail
    assert found.fix == "pip install --force-reinstall nvidia-nvshmem-cu13==3.4.5"


def test_another_host_library_on_the_loader_path(tmp_path: Path) -> None:
    """F14, with libraries that really answer."""
    root = make_copy(tmp_path / "nvshmem")
    other = tmp_path / "other"
    versions = {root / "lib": (3, 4, 5), other: (3, 6, 0)}
    for folder, (major, minor, patch) in versions.items():
        fake_library.build(
            folder / "libnvshmem_host.so.3",
            fake_library.NVSHMEM,
            MAJOR=major,
            MINOR=minor,
            PATCH=patch,
        )
    environ = {"LD_LIBRARY_PATH": f"/nonexistent::{other}"}
    probed = nvshmem.probe(environ, [root])
    assert probed.conflict is not None
    assert f"device code 3.4.5 ({root}/lib/libnvshmem_device.a)" in probed.conflict
    assert f"host library 3.6.0 ({other}/libnvshmem_host.so.3" in probed.conflict
    assert by_name(nvshmem.findings(probed))["versions"].fix == (
        f"remove {other} from LD_LIBRARY_PATH"
    )
    shutil.copy(root / "lib" / "libnvshmem_host.so.3", other)
    assert nvshmem.probe(environ, [root]).conflict is None


@pytest.mark.parametrize(
    ("arch", "served"),
    [("sm_90", True), ("sm_86", True), ("sm_75", False), ("sm_120", False), ("sm_100a", True)],
)
def test_device_code_for_the_gpus_here(arch: str, served: bool, tmp_path: Path) -> None:
    """G09: archs found and the path."""
    root = make_copy(tmp_path / "nvshmem")
    probed = nvshmem.probe({}, [root], ask_345)
    found = by_name(nvshmem.findings(probed, [arch]))
    assert ("device code" not in found) == served
    if not served:
        detail = found["device code"].detail
        assert f"no code for {arch} in {root}/lib/libnvshmem_device.a" in detail
        assert "sm_80, sm_90, sm_100" in detail


def test_where_copies_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_copy(tmp_path / "site" / "nvidia" / "nvshmem")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert nvshmem.probe({}, None, ask_345).copies[0].root == wheel
    named = nvshmem.probe({"NVSHMEM_HOME": "/nonexistent/nvshmem"}, None, ask_345)
    assert named.copies[0].root == Path("/nonexistent/nvshmem")  # the user's word is answered
    assert "lacks" in nvshmem.findings(named)[0].detail
    assert named.chosen is not None
    assert named.chosen.root == wheel


def test_failure_is_not_a_version(tmp_path: Path) -> None:
    root = make_copy(tmp_path / "nvshmem")
    probed = nvshmem.probe({}, [root], lambda *a: Failure("crashed with signal 11"))
    assert "crashed with signal 11" in nvshmem.findings(probed)[0].detail
