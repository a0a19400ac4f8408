"""The two sides of the comparison on one engine: a program in its loop, and C on its endpoint."""

from __future__ import annotations

import contextlib
import ctypes as C
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from moecomm.bench import transfer_programs as programs
from moecomm.cache import default_cache, key_of
from moecomm.emulator.build import find_compiler
from moecomm.errors import CompileError, TransportError
from moecomm.group import Group
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.efa import abi, hot
from moecomm.transport.efa.library import word
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine.blocks import Block

_FLAGS: Final = ("-O2", "-shared", "-fPIC")
PENDING: Final = 1
STUCK: Final = -1_000_000  # transfer_twin.cpp has it, too
_QUIET_S: Final = 30.0  # until engines have nothing under way; milliseconds, on a machine at rest
_TURNS: Final = 200  # of the loop before a burst: a worker that has work to do is not just awake


class Target(C.Structure):
    """Where a write goes: libfabric's address of the peer, and of the memory there."""

    _fields_ = [("peer", C.c_uint64), ("remote", C.c_uint64), ("key", C.c_uint64)]


class Twin(C.Structure):
    """See ``transfer_twin.cpp``."""

    _fields_ = [
        (name, C.c_uint64)
        for name in (
            "writemsg", "read", "ep", "cq", "contexts", "flags", "local", "desc", "spin",
        )
    ] + [(name, C.c_int64) for name in ("patience", "sent", "came")]  # fmt: skip


class _Burst(C.Structure):
    _fields_ = [
        ("twin", C.c_void_p), ("targets", C.c_void_p), ("count", C.c_int64), ("nbytes", C.c_uint64),
        ("turns", C.c_int64), ("start", C.c_int64), ("status", C.c_int64),
    ]  # fmt: skip


def compile_twin() -> Any:
    """The C code as a loaded library."""
    source = resources.files("moecomm.bench").joinpath("transfer_twin.cpp").read_bytes()
    command = [*find_compiler(), *_FLAGS]

    def build(target: Path) -> None:
        file = target.with_suffix(".cpp")
        file.write_bytes(source)
        done = subprocess.run(
            [*command, "-o", str(target), str(file)], capture_output=True, text=True, timeout=120
        )
        if done.returncode != 0:
            raise CompileError("the C side does not compile", done.stderr)

    path = default_cache().get(key_of(source, *command), ".so", build, what="the C side")
    library = C.CDLL(str(path))
    for name in ("stream", "pingpong"):
        getattr(library, name).restype = C.c_int64
    return library


def twin_of(engine: TransferEngine, src: Region, spin: int, patience_s: float) -> Twin:
    """What C needs of the engine's endpoint, to write from ``src``."""
    state, local = engine._nics[0].hooks.state, engine.local_place(src, 0)
    return Twin(
        writemsg=word(state, hot.WRITEMSG),
        read=word(state, hot.CQ_READ),
        ep=word(state, hot.EP),
        cq=word(state, hot.CQ),
        contexts=word(state, hot.CONTEXTS),
        flags=word(state, hot.FLAGS),
        local=local.address,
        desc=local.key,
        spin=spin,
        patience=int(patience_s * 1e9),
    )


def target_of(engine: TransferEngine, target: RemoteRegion) -> Target:
    """``target`` as C writes to it."""
    remote = engine.remote_place(target, 0)
    peer = word(word(engine._nics[0].hooks.state, hot.PEERS), 8 * target.rank)
    return Target(peer, remote.address, remote.key)


class Sides:
    """Both sides of one rank.

    Args:
        engine: over libfabric, with one NIC.
        src: what is written.
        targets: where, in the order of bursts.
        spin: idle polls before the C code gives up the processor, as the engine's options say.
        patience_s: C gives up a wait in which nothing is completed for so long, and the engine's
            side one that takes four times as long in all.

    Methods raise ``TransportError`` when a wait is given up, saying what for, or a call fails.
    """

    def __init__(
        self,
        engine: TransferEngine,
        src: Region,
        targets: Sequence[RemoteRegion],
        spin: int,
        patience_s: float = 30.0,
    ) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._library = compile_twin()
        self._state = Block(programs.STATE_BYTES)
        self._hooks = engine._nics[0].hooks.state
        local = engine.local_place(src, 0)
        self._twin = twin_of(engine, src, spin, patience_s)
        self._targets = (Target * len(targets))()
        for n, target in enumerate(targets):
            remote = engine.remote_place(target, 0)
            self._targets[n] = target_of(engine, target)
            at = programs.TARGET + n * programs.TARGET_BYTES
            self._state.put(at, "=QQQ", target.rank, remote.address, remote.key)
        self._set(programs.ENGINE, engine.state)
        self._set(programs.OP, engine.program_operations[0])
        self._set(programs.LOCAL, local.address)
        self._set(programs.LOCAL_KEY, local.key)
        self._set(programs.TARGETS, len(targets))

    def c_stream(self, nbytes: int, count: int, window: int) -> float:
        """Seconds for so many writes to the first target, by C."""
        with self._loops_at_rest():
            code = self._call(self._library.stream, nbytes, count, C.c_int64(window))
        return self._seconds(code, f"{count} writes by C")

    def c_pingpong(self, nbytes: int, count: int, first: bool, group: Group) -> float:
        """Seconds for so many round trips, by C, on both ranks of ``group``."""
        with self._loops_at_rest(group):
            code = self._call(self._library.pingpong, nbytes, count, int(first))
        return self._seconds(code, f"{count} round trips by C")

    def c_burst(self, nbytes: int) -> float:
        """Seconds to post one write to every target, by C in the place of the engine's program."""
        burst = _Burst(
            C.addressof(self._twin), C.addressof(self._targets), len(self._targets), nbytes,
            _TURNS, 0, PENDING,
        )  # fmt: skip
        self._time_posts()
        self._engine.set_program(address_of(self._library.burst), C.addressof(burst))
        try:
            self._wait_for(lambda: burst.status != PENDING, "a burst by C")
        finally:
            self._engine.set_program(0)
        took = burst.status or self._last_post() - burst.start
        return self._seconds(took, f"a burst of {len(self._targets)} writes by C")

    def stream(self, nbytes: int, count: int, window: int) -> float:
        """Seconds for so many writes to the first target, by the engine."""
        return self._run(programs.STREAM, nbytes, {programs.LEFT: count, programs.WINDOW: window})

    def pingpong(self, nbytes: int, count: int, first: bool) -> float:
        """Seconds for so many round trips, by the engine."""
        who = {programs.LEFT: count, programs.FIRST: int(first), programs.TURN: int(first)}
        return self._run(programs.PINGPONG, nbytes, who)

    def burst(self, nbytes: int) -> float:
        """Seconds to post one write to every target, by the engine, from the program's first
        command to the return of the last post."""
        self._time_posts()
        self._patch(address_of(self._library.timed_writemsg))
        try:
            self._run(programs.BURST, nbytes, {programs.TURN: _TURNS})
        finally:
            self._patch(self._twin.writemsg)
        return (self._last_post() - self._get(programs.START)) * 1e-9

    def _time_posts(self) -> None:
        C.c_uint64.in_dll(self._library, "real_writemsg").value = self._twin.writemsg
        C.c_int64.in_dll(self._library, "posts_left").value = len(self._targets)

    def _last_post(self) -> int:
        return C.c_int64.in_dll(self._library, "last_post").value

    def _patch(self, function: int) -> None:
        with self._engine._resources.worker.paused():
            C.c_uint64.from_address(self._hooks + hot.WRITEMSG).value = function

    def _run(self, program: int, nbytes: int, words: dict[int, int]) -> float:
        start = {programs.NBYTES: nbytes, programs.START: 0, programs.END: 0}
        for offset, value in {**start, **words}.items():
            self._set(offset, value)
        operation = self._get(programs.OP)
        self._engine.set_program(program, self._state.address)
        try:
            # Seldom: this thread must not take the worker's processor.
            self._wait_for(lambda: self._get(programs.END) != 0, "the engine's program", 0.005)
            self._wait_for(
                lambda: self._engine.program_pending(operation) == 0, "the program's last writes"
            )
        finally:
            self._engine.set_program(0)  # its state may go when this object does
        return (self._get(programs.END) - self._get(programs.START)) * 1e-9

    def _wait_for(self, condition: Callable[[], bool], what: str, every_s: float = 0.0005) -> None:
        limit = 4 * self._patience_s
        deadline = time.monotonic() + limit
        while not condition():
            self._engine.progress()
            if time.monotonic() > deadline:
                raise self._error(
                    f"{what}: not done in {limit:g} s; {self._get(programs.LEFT)} left to do"
                )
            time.sleep(every_s)

    @contextlib.contextmanager
    def _loops_at_rest(self, group: Group | None = None) -> Iterator[None]:
        """The loops of all ranks of ``group`` stand still, and have nothing under way.

        C reads the queue that the loops read. One that is still running, on a rank that comes late,
        takes the arrival that C there waits for; and C takes the completion of a credit write that
        a loop had under way. Either side then waits for good.
        """
        deadline = time.monotonic() + _QUIET_S
        while True:
            with self._engine._resources.worker.paused():
                quiet = b"" if self._engine._memory.in_flight() else b"quiet"
                if all(group.all_gather(quiet, _QUIET_S, "loops at rest") if group else [quiet]):
                    yield
                    return
            if time.monotonic() > deadline:
                raise self._error(f"posts of an engine: not done in {_QUIET_S:g} s")
            time.sleep(0.001)  # the loops go on meanwhile, and get done what is under way

    def _call(self, function: Any, nbytes: int, count: int, argument: Any) -> int:
        twin, many = C.byref(self._twin), C.c_int64(count)
        return int(function(twin, self._targets, C.c_uint64(nbytes), many, argument))

    def _seconds(self, nanoseconds: int, what: str) -> float:
        if nanoseconds >= 0:
            return nanoseconds * 1e-9
        why = f"call of libfabric failed ({nanoseconds})"
        if nanoseconds == STUCK:
            why = f"nothing completed for {self._patience_s:g} s"
        so_far = f"{self._twin.sent} writes done, {self._twin.came} arrivals so far"
        raise self._error(f"{what}: {why}; {so_far}")

    def _error(self, what: str) -> TransportError:
        text = f"rank {self._engine.rank} ({self._engine.transport}): {what}"
        return TransportError(text, operation="bench")

    def _set(self, offset: int, value: int) -> None:
        self._state.put(offset, "=Q", value & (1 << 64) - 1)

    def _get(self, offset: int) -> int:
        return int(self._state.words[offset // 8])


def address_of(function: Any) -> int:
    """Of a function of the C library."""
    return C.cast(function, C.c_void_p).value or 0


assert abi.CONTEXT_BYTES == 64  # transfer_twin.cpp has it, too
