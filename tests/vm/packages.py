"""Fetch the guest's kernel: a Debian package, unpacked but never installed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MIRROR = "https://deb.debian.org/debian"
SUITE = "bookworm"
META = "linux-image-amd64"
TIMEOUT_S = 120.0


def kernel_package(folder: Path) -> Path:
    """The path of a ``linux-image-*-amd64`` package, downloaded into ``folder``.

    By apt where it has one (that is where mirrors and proxies are configured), else from Debian's
    mirror, checked against the index.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError, LookupError):
        return _by_apt(folder)
    return _by_https(folder)


def unpack(package: Path, folder: Path) -> None:
    """The files of a Debian package under ``folder``: a ``.deb`` is an ``ar`` of two archives."""
    for name, data in _members(package.read_bytes()):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(decompress(data))) as archive:
                archive.extractall(folder, filter="tar")
            return
    raise LookupError(f"{package}: no data archive inside")


def decompress(data: bytes) -> bytes:
    """``data``, which may be xz, zstd or gzip, or plain."""
    if data[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor().decompress(data)  # the kernel has bytes after the end
    for magic, program in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x1f\x8b", "gzip")):
        if data.startswith(magic):
            done = subprocess.run([program, "-dcq"], input=data, stdout=subprocess.PIPE)
            return done.stdout
    return data


def _by_apt(folder: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise LookupError("no apt")
    shown = subprocess.run(
        ["apt-cache", "depends", META], check=True, capture_output=True, text=True
    )
    name = _find(r"Depends: (linux-image-[0-9]\S*-amd64)", shown.stdout)
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name]
    subprocess.run(command, check=True, cwd=folder, timeout=TIMEOUT_S, capture_output=True)
    return next(folder.glob(f"{name}_*.deb"))


def _by_https(folder: Path) -> Path:
    index = decompress(_get(f"dists/{SUITE}/main/binary-amd64/Packages.xz")).decode()
    entries = {_find(r"^Package: (\S+)", e): e for e in index.split("\n\n") if e.strip()}
    name = _find(r"^Depends: (linux-image-[0-9]\S*-amd64)", entries[META])
    data = _get(_find(r"^Filename: (\S+)", entries[name]))
    if hashlib.sha256(data).hexdigest() != _find(r"^SHA256: (\S+)", entries[name]):
        raise LookupError(f"{name}: what came from {MIRROR} is not what its index says")
    path = folder / f"{name}.deb"
    path.write_bytes(data)
    return path


def _get(path: str) -> bytes:
    with urllib.request.urlopen(f"{MIRROR}/{path}", timeout=TIMEOUT_S) as answer:
        data: bytes = answer.read()
    return data


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise LookupError(f"nothing like {pattern!r} in {text[:200]!r}")
    return match.group(1)


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member of an ``ar`` archive."""
    at = len(b"!<arch>\n")
    while at + 60 <= len(data):
        name, size = data[at : at + 16].decode().strip(" /"), int(data[at + 48 : at + 58])
        yield name, data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
