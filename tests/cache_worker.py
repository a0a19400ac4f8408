"""What other processes do in test_cache.py. Apart, so that starting them imports little."""

from __future__ import annotations

import errno
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from moecomm.cache import Cache, key_of

CONTENT = b"cubin" * 1000


def race(root: Path, log: Path, start: Barrier, rounds: int, locks: bool) -> None:
    """Get ``rounds`` entries, each at the same moment as all others; log own compiles."""
    if not locks:
        import fcntl

        fcntl.flock = _no_locks

    def slow_build(path: Path) -> None:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        with path.open("wb") as stream:
            stream.write(CONTENT[:100])
            stream.flush()
            time.sleep(0.005)
            stream.write(CONTENT[100:])

    for number in range(rounds):
        start.wait(60)
        path = Cache(root).get(key_of(str(number)), ".cubin", slow_build)
        if path.read_bytes() != CONTENT or root not in path.parents:
            raise SystemExit(3)


def build_forever(root: Path, key: str, ready: Path) -> None:
    def hang(path: Path) -> None:
        path.write_bytes(b"half")
        ready.touch()
        time.sleep(600)

    Cache(root).get(key, ".cubin", hang)


def _no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
