"""Memory that processes share, and memory that a NIC may lock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moecomm.doctor import foreign
from moecomm.doctor.finding import Finding, bad, ok, size_text
from moecomm.doctor.foreign import Failure

TOPIC: Final = "Memory"
# A rank's communication buffers: max_tokens 128, hidden 7168, 256 experts on 8 ranks is 0.5 GiB.
LOCKED_NEED: Final = 1 << 30
FIX_LOCKED: Final = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"
_PROBE_BYTES: Final = 1 << 16
_GREETING: Final = b"hello"


@dataclass(frozen=True, slots=True)
class Memory:
    """``locked``: bytes this process may lock, ``None``: any number. ``shared``: how ranks of one
    machine share memory; ``refusal``: why they cannot. ``free``: bytes of memory free now."""

    locked: int | None = None
    shared: str = ""
    refusal: str | None = None
    free: int | None = None


def probe(ask: Callable[..., Any] = foreign.ask) -> Memory:
    """Read the limit, and share memory with a child process as ranks do with each other."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = None if soft == resource.RLIM_INFINITY else soft
    try:
        return Memory(locked, _share(ask), None, _free())
    except OSError as error:
        return Memory(locked, refusal=str(error))


def _share(ask: Callable[..., Any]) -> str:
    """Make shared memory as the loopback transport does, have a child write to it; say how."""
    if not hasattr(os, "memfd_create"):  # macOS
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile() as stream:
            stream.truncate(_PROBE_BYTES)
        return f"files in {folder}, {size_text(shutil.disk_usage(folder).free)} there"
    descriptor = os.memfd_create("moecomm-doctor")
    try:
        os.ftruncate(descriptor, _PROBE_BYTES)
        answer = ask("shared", f"/proc/{os.getpid()}/fd/{descriptor}")
        if isinstance(answer, Failure):
            raise OSError(f"another process cannot open a memfd of this one: {answer.why}")
        if os.pread(descriptor, len(_GREETING), 0) != _GREETING:
            raise OSError("what another process writes to a memfd does not arrive")
    finally:
        os.close(descriptor)
    return "memfd"


def write_shared(path: str) -> bool:
    """In the child process (see ``foreign``): write to the parent's memory."""
    with open(path, "r+b", buffering=0) as stream:
        stream.write(_GREETING)
    return True


def _free() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            fields = dict(line.split(":", 1) for line in stream)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def findings(memory: Memory, *, has_nic: bool) -> list[Finding]:
    """``has_nic``: whether a low limit on locked memory matters here."""
    return [_shared(memory), _locked(memory, has_nic)]


def _shared(memory: Memory) -> Finding:
    if memory.refusal is not None:
        fix = "allow memfd_create and /proc/<pid>/fd in the container's security profile"
        return bad(TOPIC, "shared memory", memory.refusal, fix, required=True)
    free = "" if memory.free is None else f", {size_text(memory.free)} free"
    return ok(TOPIC, "shared memory", memory.shared + free, required=True)


def _locked(memory: Memory, has_nic: bool) -> Finding:
    name = "locked memory"
    if memory.locked is None:
        return ok(TOPIC, name, "no limit")
    text = f"limit {size_text(memory.locked)}"
    if memory.locked >= LOCKED_NEED:
        return ok(TOPIC, name, text)
    if not has_nic:
        return ok(TOPIC, name, f"{text}, enough without a NIC")
    detail = f"{text}; registering buffers with a NIC needs about {size_text(LOCKED_NEED)} a rank"
    return bad(TOPIC, name, detail, FIX_LOCKED)
