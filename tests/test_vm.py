"""The parts of the virtual machine that need none: archives, module order, results."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from vm import figures, image, machine, packages, plugin


def test_an_archive_of_files_and_their_folders() -> None:
    files = {"init": b"#!/bin/sh\n", "modules/a.ko": b"12345", "empty": b""}
    data, found = image._cpio(files), {}
    at = 0
    while True:
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        assert data[at : at + 6] == b"070701"
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        at = -(-(at + 110 + name_size) // 4) * 4
        if name == "TRAILER!!!":
            break
        found[name] = mode, data[at : at + size]
        at = -(-(at + size) // 4) * 4
    assert {n: content for n, (mode, content) in found.items() if mode == 0o100755} == files
    assert {n for n, (mode, _) in found.items() if mode == 0o040755} >= {"dev", "proc", "modules"}
    assert list(found).index("modules") < list(found).index("modules/a.ko")


def test_modules_follow_what_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lib/modules/6.1/kernel/net"
    folder.mkdir(parents=True)
    for name, needs in {"a": "b-b,c", "b-b": "c", "c": "", "unused": ""}.items():
        text = b"junk\0license=GPL\0depends=" + needs.encode() + b"\0name=x\0"
        (folder / f"{name}.ko.xz").write_bytes(lzma.compress(text))
    monkeypatch.setattr(image, "MODULES", ("a", "built_in"))
    assert [path.name.split(".")[0] for path in image._modules(tmp_path)] == ["c", "b-b", "a"]


def test_a_debian_package_is_unpacked(tmp_path: Path) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        member = tarfile.TarInfo("./boot/vmlinuz-6.1")
        member.size = 6
        archive.addfile(member, io.BytesIO(b"kernel"))
    package = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0"), ("data.tar.xz", lzma.compress(tar.getvalue()))):
        package += f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(data):<10}`\n".encode()
        package += data + b"\n" * (len(data) % 2)
    (tmp_path / "linux.deb").write_bytes(package)
    packages.unpack(tmp_path / "linux.deb", tmp_path)
    assert (tmp_path / "boot/vmlinuz-6.1").read_bytes() == b"kernel"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert "qemu-system-x86_64 (Debian package qemu-system-x86)" in machine.missing()
    monkeypatch.setenv("MOECOMM_TEST_VM", "off")
    assert "MOECOMM_TEST_VM=off" in plugin.missing()


def lines(*entries: tuple[str, str]) -> list[str]:
    return [
        json.dumps({"test": test, "outcome": outcome, "seconds": 1.5, "text": outcome})
        for test, outcome in entries
    ]


def test_results_of_the_guest() -> None:
    report = lines(
        ("good", "started"),
        ("good", "passed"),
        ("bad", "started"),
        ("bad", "failed"),
        ("bad", "passed"),  # its teardown
        ("skipped", "started"),
        ("skipped", "skipped"),
        ("skipped", "passed"),
        ("last", "started"),
    )
    results = plugin._results(report)
    outcomes = {test: result.outcome for test, result in results.items()}
    assert outcomes == {"good": "passed", "bad": "failed", "skipped": "skipped", "last": "failed"}
    assert results["last"].text == "it did not end"


def test_half_a_round_trip_leaves_out_the_wait_for_the_other_side_and_one_hiccup() -> None:
    trips = [9_000_000, 20, 22, 20, 4_000_000, 24, 20, 26]
    typical, average = figures.half_round_trip(np.cumsum([1000, *trips]), us=0.5)
    assert (typical, average) == (21 / 4, 22 / 4)


def test_the_guest_runs_the_checkout_whatever_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What numba has compiled here is found there by the path of its source."""
    root = str(Path(__file__).parents[1])
    for given in ("", "/elsewhere"):
        monkeypatch.setenv("PYTHONPATH", given)
        path = plugin.guest_environment()["PYTHONPATH"].split(":")
        assert path == [f"{root}/tests", *filter(None, [given]), root]
