"""Bounces, on a CPU: what pull does when not all is well."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, run_case, send
from remote import World, pretend, served, simulate_remote

import moecomm as mc
from moecomm.remote import WORD
from moecomm.remote_words import FREE, RemoteWords
from moecomm.runtime import cpu

CFG = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=104, max_tokens=13, layout="grouped", in_flight=1, timeout_s=1.0
)


def _store(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


@pytest.mark.parametrize(("claimed", "pulled"), [(2, 1), (1, 0)], ids=["this", "the one before"])
def test_pull_waits_for_a_copy_that_another_has_begun(
    monkeypatch: pytest.MonkeyPatch, claimed: int, pulled: int
) -> None:
    """One that never ends, of this epoch or of the one before: rank 0 itself is to blame."""
    world = World(served("bounce"), [0, 1])
    cases = [make_case(CFG, 2, step) for step in range(2)]
    pretend(monkeypatch, world)
    ends = simulate_remote(world, _stuck, cases, claimed, pulled, checks=False)
    assert ends == [0, None]


def _stuck(group: mc.Group, cases: list[Case], claimed: int, pulled: int) -> int | None:
    with mc.MoeComm(CFG, group) as comm:
        run_case(comm, cases[0])
        handle = send(comm, cases[1])
        if group.rank == 0:
            local, areas = comm._runtime.local, comm.layout.local
            _store(local + areas["pull_claim"].offset, claimed)
            _store(local + areas["pulled"].offset, pulled)
        try:
            comm.dispatch_recv(handle)
        except mc.PeerTimeout as error:
            return error.peer
        finally:
            group.barrier(60)
    return None


def test_a_pull_that_gives_up_wakes_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has only heard that the group has given up."""
    world = World(served("bounce"), [0, 1])
    pretend(monkeypatch, world)
    ends = simulate_remote(world, _hear, make_case(CFG, 2), checks=False)
    assert ends[0] == [FREE] * 2


def _hear(group: mc.Group, case: Case) -> list[int]:
    with mc.MoeComm(CFG, group) as comm:
        flags, words = comm._runtime.remote_flags, RemoteWords(comm.layout.areas, group.rank)
        if group.rank == 0:
            handle = send(comm, case)
            _store(flags + WORD * words.abort_in, 1 << 63 | 1 << 32 | 1 << 16 | 1)
            with pytest.raises(mc.PeerTimeout):
                comm.dispatch_recv(handle)
        group.barrier(60)
        return [
            ctypes.c_uint64.from_address(flags + WORD * words.landed(0, half)).value
            for half in range(2)
        ]


def test_a_step_that_overflows_sends_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four halves are launched before anybody learns of it: pull must not wait for any."""
    world = World(served("bounce", private_records=3), [0, 1, 0])
    counts = [[1, 1, 1], [13, 13, 13], [13, 13, 13], [1, 1, 0]]
    cases = [make_case(CFG, 3, step, tokens=tokens) for step, tokens in enumerate(counts)]
    pretend(monkeypatch, world)
    monkeypatch.setattr(cpu.CpuRuntime, "synchronous", False)
    for seed in range(4):
        simulate_remote(world, _overflow, cases, seed=seed, checks=False)


def _overflow(group: mc.Group, cases: list[Case]) -> None:
    cfg: Any = dataclasses.replace(CFG, max_recv_tokens=6)
    with mc.MoeComm(cfg, group) as comm:
        for case in cases:
            handle = send(comm, case)
            comm.dispatch_recv(handle)
            y = np.zeros(comm.layout.recv_shape, case.ys[group.rank].dtype)
            comm.combine_send(y, handle)
            weights = None if case.weights_at_dispatch else case.weights[group.rank]
            comm.combine_recv(handle, weights)
        with pytest.raises(mc.Overflow):
            comm.check()
        group.barrier(60)
