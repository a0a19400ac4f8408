"""Copies of NVSHMEM on this machine: where they are, and what their headers say."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HOST_LIBRARY: Final = "libnvshmem_host.so.3"
ARCHIVE: Final = "lib/libnvshmem_device.a"
VERSION_HEADER: Final = "include/non_abi/nvshmem_version.h"
_VERSION_LINE: Final = re.compile(r"#define\s+NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION\s+(\d+)")

Version = tuple[int, ...]


def roots(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Existing candidates in the order in which they are tried: the user's word, the wheel, the
    usual place."""
    named = [Path(environ["NVSHMEM_HOME"])] if environ.get("NVSHMEM_HOME") else []
    wheels = [Path(entry) / "nvidia" / "nvshmem" for entry in sys.path if entry]
    candidates = [*named, *wheels, Path("/usr/local/nvshmem")]
    return [root for root in dict.fromkeys(candidates) if root in named or root.is_dir()]


def host_library(root: Path) -> Path | None:
    """The host library of a copy; its name has the major version at the end."""
    found = [root / "lib" / HOST_LIBRARY, *sorted((root / "lib").glob("libnvshmem_host.so*"))]
    return next((path for path in found if path.is_file()), None)


def header_version(root: Path) -> Version | None:
    """Return the version that the headers of a copy state."""
    file = root / VERSION_HEADER
    if not file.is_file():
        return None
    numbers = dict(_VERSION_LINE.findall(file.read_text(encoding="utf-8", errors="replace")))
    if not {"MAJOR", "MINOR", "PATCH"} <= set(numbers):
        return None
    return tuple(int(numbers[part]) for part in ("MAJOR", "MINOR", "PATCH"))


def text(version: Version | None) -> str:
    return ".".join(map(str, version)) if version else "of unknown version"
