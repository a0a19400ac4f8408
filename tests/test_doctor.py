"""The doctor: Python, compiler, cache, memory, network, toolchain, report and command."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from moecomm.cli import doctor as command
from moecomm.doctor import (
    compiler,
    finding,
    foreign,
    jit,
    memory,
    network,
    packages,
    report,
    storage,
)
from moecomm.doctor.finding import Finding, State
from moecomm.doctor.foreign import Failure
from moecomm.doctor.packages import Packages
from moecomm.doctor.report import Report
from moecomm.doctor.transports import Verdict
from moecomm.errors import CompileError
from moecomm.kernels.jit import Toolchain, check_versions
from moecomm.kernels.jit.toolchain import Library, Version

GOOD = {"numpy": "2.4.6", "ml_dtypes": "0.6.0", "numba": "0.68.1"}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {found.name: found for found in findings}


# Packages


def test_packages_here_are_good() -> None:
    found = packages.findings(packages.probe())
    assert not any(f.fatal for f in found)
    assert by_name(found)["numpy"].state is State.ok


def test_optional_packages_name_what_installs_them() -> None:
    found = by_name(packages.findings(Packages((3, 11, 0), GOOD)))
    assert found["torch"].fix == 'pip install "moecomm[torch]"'
    assert found["numba-cuda"].fix == 'pip install "moecomm[cuda13]"'
    assert not any(f.fatal for f in found.values())


@pytest.mark.parametrize(
    ("python", "versions", "culprit", "fix"),
    [
        ((3, 10, 12), GOOD, "Python", ""),
        ((3, 12, 0), {**GOOD, "numpy": "1.26.4"}, "numpy", 'pip install "numpy>=2.0"'),
        (
            (3, 12, 0),
            {k: v for k, v in GOOD.items() if k != "numba"},
            "numba",
            'pip install "numba>=0.61"',
        ),
        ((3, 12, 0), {**GOOD, "ml_dtypes": "0.4.1"}, "ml_dtypes", 'pip install "ml_dtypes>=0.5"'),
    ],
)
def test_what_the_cpu_path_lacks_is_fatal(
    python: tuple[int, ...], versions: dict[str, str], culprit: str, fix: str
) -> None:
    fatal = [f for f in packages.findings(Packages(python, versions)) if f.fatal]
    assert [f.name for f in fatal] == [culprit]
    assert fatal[0].fix == fix


@pytest.mark.parametrize(
    ("numpy", "clash"), [("2.4.6", False), ("2.5.0", True), ("2.10.1", True), ("3.0", True)]
)
def test_numba_cuda_needs_row_stack(numpy: str, clash: bool) -> None:
    versions = {**GOOD, "numpy": numpy, "numba-cuda": "0.30.4"}
    found = by_name(packages.findings(Packages((3, 12, 0), versions)))
    assert ("numba-cuda with numpy" in found) == clash
    if clash:
        assert "np.row_stack" in found["numba-cuda with numpy"].detail
        assert found["numba-cuda with numpy"].fix == 'pip install "numpy<2.5"'


def test_odd_versions_do_not_stop_the_doctor() -> None:
    assert packages.release("2.5.0rc1+local") == (2, 5)
    assert packages.release("unknown") == (0, 0)
    found = by_name(packages.findings(Packages((3, 11, 0), {**GOOD, "torch": "2.13.0+cpu"})))
    assert "CPUs only" in found["torch"].detail


# C++ compiler


def test_compiler_here_builds_and_runs() -> None:
    probed = compiler.probe()
    assert probed.error is None
    [found] = compiler.findings(probed)
    assert found.state is State.ok
    assert probed.version in found.detail


def fake_compiler(folder: Path, script: str) -> tuple[str, ...]:
    tool = folder / "cxx"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return (str(tool),)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'x.cpp:1: fatal error: atomic: No such file' >&2; exit 1", "fatal error: atomic"),
        ("exit 3", "exit code 3"),
        ("exit 0", "does not load"),
        ('for a; do case $p in -o) echo x > "$a";; esac; p=$a; done', "does not load"),
    ],
    ids=["no headers", "silent", "writes nothing", "writes rubbish"],
)
def test_compiler_that_does_not_work(script: str, error: str, tmp_path: Path) -> None:
    command = fake_compiler(tmp_path, script)
    probed = compiler.probe(lambda: command)
    assert error in (probed.error or "")
    [found] = compiler.findings(probed)
    assert found.fatal
    assert "g++" in found.fix


def test_no_compiler() -> None:
    def find() -> tuple[str, ...]:
        raise CompileError("no C++ compiler found")

    [found] = compiler.findings(compiler.probe(find))
    assert found.fatal
    assert found.detail == "no C++ compiler found"


def test_compiler_is_tried_where_the_cache_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that forbids execution shows only there."""
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    tried = []

    def load(path: str) -> object:
        tried.append(Path(path))
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(compiler.ctypes, "CDLL", load)
    probed = compiler.probe()
    assert tmp_path in tried[0].parents
    assert "failed to map segment" in (probed.error or "")
    assert os.listdir(tmp_path) == []


# Cache directory


def test_storage(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "a.cubin").write_bytes(b"x" * 5000)
    (tmp_path / "key" / ".lock.cubin").write_bytes(b"")
    probed = storage.probe(tmp_path)
    assert (probed.refusal, probed.entries, probed.nbytes) == (None, 1, 5000)
    [found] = storage.findings(probed)
    assert found.state is State.ok
    assert "1 files, 5 KiB" in found.detail
    [low] = storage.findings(replace(probed, free=1 << 20))
    assert low.state is State.bad
    assert "1 MiB free" in low.detail


def test_storage_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    for probed in (storage.probe(blocker / "cache"), storage.Storage(None, "no home")):
        [found] = storage.findings(probed)
        assert found.state is State.bad
        assert not found.fatal  # kernels are then built in a private directory
        assert "MOECOMM_CACHE_DIR" in found.fix


# Memory


def test_shared_memory_here() -> None:
    probed = memory.probe()
    assert probed.refusal is None
    assert not any(f.fatal for f in memory.findings(probed, has_nic=True))


def test_memfd_that_others_cannot_open() -> None:
    probed = memory.probe(lambda *a: Failure("PermissionError: [Errno 13]"))
    assert "another process cannot open" in (probed.refusal or "")
    shared, _ = memory.findings(probed, has_nic=False)
    assert shared.fatal
    deaf = memory.probe(lambda *a: True)
    assert "does not arrive" in (deaf.refusal or "")


def test_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "not permitted" in (memory.probe().refusal or "")
    monkeypatch.delattr(os, "memfd_create")
    assert memory.probe().shared.startswith("files in ")


def test_locked_memory() -> None:
    """F11: the message gives limit and need."""
    low = memory.Memory(locked=64 << 10, shared="memfd")
    _, found = memory.findings(low, has_nic=True)
    assert found.state is State.bad
    assert "limit 64 KiB" in found.detail
    assert "1 GiB" in found.detail
    assert "ulimit -l unlimited" in found.fix
    assert memory.findings(low, has_nic=False)[1].state is State.ok
    for enough in (None, 2 << 30):
        probed = memory.Memory(locked=enough, shared="memfd")
        assert memory.findings(probed, has_nic=True)[1].state is State.ok


# Network


def test_network_here() -> None:
    probed = network.probe()
    assert probed.ipv4 is None or probed.ipv6 is None


@pytest.mark.parametrize(
    ("gone", "states", "fatal"),
    [
        ((), (State.ok, State.ok), 0),
        ((socket.AF_INET,), (State.absent, State.ok), 0),
        ((socket.AF_INET6,), (State.ok, State.absent), 0),
        ((socket.AF_INET, socket.AF_INET6), (State.bad, State.bad), 2),
    ],
    ids=["both", "IPv6 only", "IPv4 only", "none"],
)
def test_network_with_one_protocol_or_none(
    gone: tuple[socket.AddressFamily, ...], states: tuple[State, ...], fatal: int
) -> None:
    """F12: IPv6 alone is enough."""

    def connect(family: socket.AddressFamily, address: str) -> None:
        if family in gone:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    found = network.findings(network.probe(connect))
    assert tuple(f.state for f in found) == states
    assert sum(f.fatal for f in found) == fatal


# Toolchain


def test_toolchain_here() -> None:
    found = by_name(jit.findings(jit.probe()))
    assert found["toolchain"].state is State.ok
    assert "NVRTC" in found["toolchain"].detail


def test_toolchain_missing_or_clashing() -> None:
    def missing() -> Toolchain:
        raise CompileError('CUDA kernels cannot be compiled here: no NVRTC. Run pip install "x"')

    def clashing() -> Toolchain:
        linker = Library("nvJitLink", Version(13, 0), "/lib/libnvJitLink.so.13")
        check_versions(linker, Library("NVVM", Version(13, 5), release="13.5.37"))
        raise AssertionError

    [found] = jit.findings(jit.probe(missing))
    assert found.detail.endswith("no NVRTC")
    assert found.fix == 'pip install "x"'
    assert not found.fatal
    [found] = jit.findings(jit.probe(clashing))
    assert "NVVM 13.5.37" in found.detail
    assert found.fix.startswith('pip install "nvidia-cuda-nvrtc==13.0.*"')


def test_disassembler_is_optional() -> None:
    found = by_name(jit.findings(jit.probe(find_disassembler=lambda: None)))
    assert found["disassembler"].state is State.absent
    assert found["disassembler"].fix == "pip install nvidia-cuda-nvdisasm"


# Foreign libraries


def test_child_that_fails_says_why() -> None:
    answer = foreign.ask("nvshmem", "/nonexistent/library.so")
    assert isinstance(answer, Failure)
    assert "/nonexistent/library.so" in answer.why
    assert foreign._reason(-11, "") == "crashed with signal 11"
    assert foreign._reason(-6, "a\nabort: x\n") == "crashed with signal 6: abort: x"
    assert foreign._reason(3, "") == "exit code 3"


# Report and command


def machine_report(*extra: Finding) -> Report:
    good = finding.ok("Python", "Python", "3.12.0", required=True)
    tool = finding.absent("GPU", "driver", "no [libcuda]", "install [it]")
    return Report((good, tool, *extra), (Verdict("loopback", True, "shared memory"),))


def test_missing_optional_parts_are_not_fatal() -> None:
    broken = finding.bad("RDMA", "mlx5_0", "no active port", "plug in")
    assert machine_report(broken).cpu_works
    fatal = finding.absent("Python", "numba", "not installed", "pip install numba", required=True)
    assert not machine_report(fatal).cpu_works


def test_examine_this_machine() -> None:
    stages: list[str] = []
    found = report.examine(stages.append)
    assert found.cpu_works
    assert len(stages) >= 5
    assert [verdict.name for verdict in found.transports] == [
        "loopback",
        "nvlink",
        "nvshmem",
        "verbs",
        "efa",
    ]
    for item in found.findings:
        if item.state is State.bad:
            assert item.detail
    data = json.loads(json.dumps(found.to_dict()))
    assert data["cpu_works"] is True
    assert {item["state"] for item in data["findings"]} <= {"ok", "absent", "bad"}


@pytest.mark.parametrize("fatal", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_code(
    fatal: bool,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    extra = [finding.bad("CPU emulator", "C++ compiler", "none", "get one", required=True)]
    monkeypatch.setattr(command, "examine", lambda stage: machine_report(*extra * fatal))
    if fatal:
        with pytest.raises(command.typer.Exit) as caught:
            command.doctor(as_json=as_json)
        assert caught.value.exit_code == 1
    else:
        command.doctor(as_json=as_json)
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["cpu_works"] is not fatal
    else:
        assert ("The CPU path does not work: C++ compiler." in out) == fatal


@pytest.mark.parametrize("width", [60, 200])
def test_tables_show_everything(width: int) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    command.show(machine_report(), console)
    text = console.export_text()
    console.file.close()
    for part in ("driver", "no [libcuda]", "→ install [it]", "loopback", "yes", "shared memory"):
        assert part in text


def test_command_in_a_process_of_its_own() -> None:  # G11
    done = subprocess.run(
        [sys.executable, "-m", "moecomm", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cpu_works"] is True


def test_size_text() -> None:
    sizes = (0, 1023, 1024, 65536, 3 << 20, 141 << 30, 5 << 40)
    assert [finding.size_text(n) for n in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1 KiB",
        "64 KiB",
        "3 MiB",
        "141 GiB",
        "5.0 TiB",
    ]
