"""The directory of compiled kernels."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm.cache import default_root
from moecomm.doctor.finding import Finding, bad, ok, size_text

TOPIC: Final = "Kernel cache"
LOW_SPACE: Final = 64 << 20  # bytes; all kernels for three architectures take a few MiB
_FIX: Final = "export MOECOMM_CACHE_DIR=<a directory that can be written>"


@dataclass(frozen=True, slots=True)
class Storage:
    """``root``: the directory (``None``: no home); ``refusal``: why it cannot be written."""

    root: Path | None
    refusal: str | None = None
    entries: int = 0
    nbytes: int = 0
    free: int | None = None


def probe(root: Path | None = None) -> Storage:
    """Write a file and count what is there. Makes the directory, as the first kernel would."""
    folder = default_root() if root is None else root
    if folder is None:
        return Storage(None, "there is no home directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"x")
    except OSError as error:
        return Storage(folder, str(error), *_usage(folder))
    return Storage(folder, None, *_usage(folder), shutil.disk_usage(folder).free)


def _usage(folder: Path) -> tuple[int, int]:
    """Number of entries and bytes of all files below ``folder``."""
    entries = nbytes = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                nbytes += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # another process replaced it
                continue
            entries += not name.startswith(".")
    return entries, nbytes


def findings(storage: Storage) -> list[Finding]:
    where = str(storage.root or "no directory")
    used = f"{storage.entries} files, {size_text(storage.nbytes)}"
    if storage.refusal is not None:
        detail = f"{where} cannot be written ({storage.refusal}): kernels are compiled again in "
        return [bad(TOPIC, "directory", f"{detail}every process", _FIX)]
    if storage.free is not None and storage.free < LOW_SPACE:
        detail = f"{where}: only {size_text(storage.free)} free"
        return [bad(TOPIC, "directory", detail, _FIX)]
    return [ok(TOPIC, "directory", f"{where}, {used}")]
