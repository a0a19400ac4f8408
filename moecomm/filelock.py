"""An exclusive lock between processes that gives up rather than hangs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

POLL_S: Final = 0.01


@contextlib.contextmanager
def exclusive(file: Path, timeout_s: float) -> Iterator[bool]:
    """Hold ``file`` (made if absent) as a lock; yields whether it is held.

    ``flock`` rather than ``lockf``: it also excludes threads, and does not end when another
    descriptor of the file is closed. Yields ``False`` where locks do not work (some network file
    systems, Windows) and when another holder has not let go after ``timeout_s``: the caller's
    work must stay right, if done twice, without the lock.
    """
    if sys.platform == "win32":
        yield False
        return
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        logger.debug("no lock %s: %s", file, error)
        yield False
        return
    try:
        held = _acquire(descriptor, file, timeout_s)
        try:
            yield held
        finally:  # explicitly: a child forked meanwhile shares the descriptor and would keep it
            if held:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, file: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.debug("locks do not work for %s: %s", file, error)
                return False
        if time.monotonic() > deadline:
            logger.warning("%s is still held by another process after %.0f s", file, timeout_s)
            return False
        time.sleep(POLL_S)
