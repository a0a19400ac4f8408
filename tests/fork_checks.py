"""A fork of a process whose memory a network interface writes to: the child lives and may read all
of it, the parent keeps the pages that the interface knows."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import numpy as np
from transport_conformance import fill, payload, raised, read, registered

from moecomm.errors import StateError
from moecomm.group import Group
from moecomm.transport.base import Region
from moecomm.transport.engine import TransferEngine

NBYTES = 3000
WAIT_S = 100.0  # an emulated machine, perhaps on a busy one


def fork_after_registering(group: Group, open_it: Callable[[Group], TransferEngine]) -> None:
    """Two ranks write to each other before and after both have forked; each child is refused the
    engine, and has what was in memory of the process when it was forked. (What ``allocate`` gave
    is mapped shared: it does not change its pages, but shows a child what comes later.)"""
    peer = 1 - group.rank
    array = np.zeros(4 * mmap.PAGESIZE, np.uint8)  # any memory: it has pages in common with others
    with open_it(group) as engine:
        given = Region(array.ctypes.data + 1234, NBYTES)
        ours = [engine.allocate(NBYTES), engine.allocate(NBYTES)]
        assert all(region.address % mmap.PAGESIZE == 0 for region in ours)
        targets = [ours[0], given]
        remotes = [registered(engine, group, region)[peer] for region in targets]

        def exchange(number: int) -> None:
            fill(ours[1], payload(group.rank, number, NBYTES))
            for remote in remotes:
                engine.wait(engine.write(ours[1], remote, number))
            engine.wait_imm(number, 2, WAIT_S)

        def has(number: int) -> bool:
            expected = payload(peer, number, NBYTES)
            return [read(region) for region in targets] == [expected] * 2

        exchange(1)
        assert has(1)
        pid, end = _fork(lambda: _child(engine, ours, given, payload(peer, 1, NBYTES)))
        # Whoever writes first to a page that two share gets a new one: it must not be the parent.
        for region in targets:
            fill(region, bytes(NBYTES))
        group.barrier(WAIT_S)
        exchange(2)
        assert has(2)
        assert not array[:1234].any()
        os.close(end)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert exit_code == 0, "see the child's traceback"
        group.barrier(WAIT_S)
        exchange(3)  # the child's end has taken nothing away
        assert has(3)
        group.barrier(WAIT_S)


def _child(engine: TransferEngine, ours: list[Region], given: Region, then: bytes) -> None:
    assert read(given) == then
    assert [len(read(region)) for region in ours] == [NBYTES, NBYTES]
    for call in (engine.progress, lambda: engine.allocate(64), lambda: engine.register(given)):
        assert f"process {os.getpid()} was forked" in raised(call, StateError)
    engine.close()


def _fork(work: Callable[[], None]) -> tuple[int, int]:
    """A child that does ``work`` once the descriptor that comes with its number is closed."""
    start, end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside the engine's thread
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(WAIT_S))
        try:
            os.close(end)
            os.read(start, 1)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of the parent's must run here
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(start)
    return pid, end
