"""Lets a test run as a user whom file modes stop, also where tests run as root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def ordinary_folder() -> Iterator[Path]:
    """A temporary directory that belongs to the user the test runs as meanwhile.

    pytest's own are closed to everybody but the user who started it.
    """
    superuser = os.geteuid() == 0
    if superuser:
        os.seteuid(NOBODY)
    try:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    finally:
        if superuser:
            os.seteuid(0)
