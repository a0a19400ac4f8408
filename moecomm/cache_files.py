"""Files of the kernel cache: ``<sha256 of the content><suffix>``, checked when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

STAGING: Final = ".build-"  # directories in which builders write
STALE_BUILD_S: Final = 3600.0  # leftovers of killed builders


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find(folder: Path, suffix: str) -> Path | None:
    """Return the first file whose content matches its name."""
    try:
        names = sorted(name for name in os.listdir(folder) if _is_entry(name, suffix))
    except OSError:
        return None
    for name in names:
        file = folder / name
        try:
            if digest(file) == name.removesuffix(suffix):
                return file
            logger.debug("%s is damaged", file)
        except OSError as error:  # unreadable, or gone meanwhile
            logger.debug("%s cannot be used: %s", file, error)
    return None


def _is_entry(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and len(name) == 64 + len(suffix) and not name.startswith(".")


def sweep(folder: Path, suffix: str, keep: Path) -> None:
    """Remove damaged entries, and staging directories that killed builders left.

    Only with the lock held and no valid entry there: without it, what was read as damaged could
    be somebody's good file of the same name by the time it is removed.
    """
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            file = folder / name
            if _is_entry(name, suffix):
                logger.warning("%s was damaged: building it again", file)
                file.unlink()
            elif name.startswith(STAGING) and file != keep and _age_s(file) > STALE_BUILD_S:
                shutil.rmtree(file, ignore_errors=True)


def _age_s(file: Path) -> float:
    return time.time() - file.stat().st_mtime
