"""Build what the virtual machine boots: an uncompressed kernel, and an initramfs of the few
modules that it needs. Both go to a folder that later runs reuse."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vm.packages import decompress, kernel_package, unpack

HERE = Path(__file__).parent
# crc32_generic: soft-RoCE asks the crypto layer for "crc32", which no dependency says.
MODULES = (
    "crc32_generic",
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtiofs",
    "virtio_net",
    "virtio_rng",
    "ib_uverbs",
    "rdma_ucm",
    "ib_umad",
    "rdma_rxe",
    "dummy",
)


@dataclass(frozen=True)
class Image:
    """The two files that QEMU starts from."""

    kernel: Path
    initramfs: Path


def cache_folder() -> Path:
    """Where images are kept: ``MOECOMM_TEST_VM_FOLDER``, else below the user's cache folder."""
    configured = os.environ.get("MOECOMM_TEST_VM_FOLDER")
    if configured:
        return Path(configured).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "moecomm-test-vm"


def image(folder: Path | None = None) -> Image:
    """The image in ``folder``, built when it is not there or was built by another version of
    these files. Processes that come at once build it once."""
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256()
    for source in ("init", "image.py", "packages.py"):
        key.update((HERE / source).read_bytes())
    home = folder / key.hexdigest()[:16]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _build(Path(work))
                (Path(work) / "image").rename(home)
    return Image(home / "vmlinux", home / "initramfs")


def _build(work: Path) -> None:
    root = work / "root"
    unpack(kernel_package(work), root)
    done = work / "image"
    done.mkdir()
    (done / "vmlinux").write_bytes(_uncompressed(next(root.glob("boot/vmlinuz-*")).read_bytes()))
    busybox = shutil.which("busybox")
    if busybox is None:
        raise LookupError("busybox is not installed (Debian package busybox-static)")
    files = {"init": (HERE / "init").read_bytes(), "bin/busybox": Path(busybox).read_bytes()}
    modules = [(path.name.split(".")[0], path) for path in _modules(root)]
    files |= {f"modules/{name}.ko": decompress(path.read_bytes()) for name, path in modules}
    files["modules/order"] = "".join(f"{name}\n" for name, _ in modules).encode()
    (done / "initramfs").write_bytes(_cpio(files))


def _uncompressed(bzimage: bytes) -> bytes:
    """The kernel as an ELF file, which QEMU starts at its PVH entry: the guest, which is
    interpreted, need not unpack it. See Documentation/x86/boot.rst of the kernel."""
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (bzimage[0x1F1] + 1) * 512 + offset
    return decompress(bzimage[start : start + length])


def _modules(root: Path) -> list[Path]:
    """The modules to load, each after those that it depends on."""
    known = {_name(path.name): path for path in root.glob("lib/modules/*/kernel/**/*.ko*")}
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        path = known.get(name)
        if path is None or name in order:  # None: built into this kernel
            return
        for needed in _dependencies(decompress(path.read_bytes())):
            add(needed)
        order[name] = path

    for module in MODULES:
        add(_name(module))
    return list(order.values())


def _name(file: str) -> str:
    return file.split(".")[0].replace("-", "_")


def _dependencies(module: bytes) -> Iterator[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    for name in found.group(1).decode().split(",") if found else ():
        if name:
            yield _name(name)


def _cpio(files: dict[str, bytes]) -> bytes:
    """A "newc" archive of ``files`` and of the folders that they and the guest need."""
    folders = {"proc", "sys", "dev", *(str(Path(name).parent) for name in files)} - {"."}
    entries = [(name, 0o040755, b"") for name in sorted(folders)]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    archive = b""
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields)
        archive += name.encode() + b"\0"
        archive += b"\0" * (-len(archive) % 4) + data
        archive += b"\0" * (-len(archive) % 4)
    return archive
