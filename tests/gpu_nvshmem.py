"""What ranks do in the tests of the nvshmem transport on GPUs; imported by each of them."""

from __future__ import annotations

import os
import time
from typing import Any

import gpu_ranks
import pytest
from exchange import make_case
from gpu_exchange import OnGpu, on_device
from gpu_ranks import until_timeout, warmed_up

import moecomm as mc
from moecomm.runtime import nvshmem
from moecomm.transport.nvshmem import finalize


def kind_of_peers(group: mc.Group, cfg: mc.MoeConfig) -> str:
    """How kernels reach peers: by stores, or by which puts."""
    with mc.MoeComm(cfg, group) as comm:
        remote = comm.layout.remote
        group.barrier(60)
    return "stores" if remote is None else f"{remote.mode} puts"


def die_or_survive(group: mc.Group, cfg: mc.MoeConfig) -> tuple[str, int, float]:
    """Rank 1 is killed after a dispatch; what the others see, and how fast. Closing does not wait
    for it, though NVSHMEM's own end would."""
    given, _ = warmed_up(group, cfg, None)
    comm = mc.MoeComm(cfg, group)
    given.run(comm)
    group.barrier(60)
    if group.rank == 1:
        given.send(comm)
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    error = until_timeout(comm, given)
    comm.close()
    return error.phase, error.peer, time.monotonic() - started


def start_again(group: mc.Group, cfg: mc.MoeConfig, times: int) -> None:
    """NVSHMEM finalised after each, in turn with the ranks in order and from the last."""
    turned = group.subgroup(range(group.size)[::-1])
    assert turned is not None
    for n in range(times):
        ranks = (group, turned)[n % 2]
        gpu_ranks.exchange_all(ranks, [(cfg, None)], 3)
        finalize(ranks, 60)
        group.barrier(60)


def two_at_once(group: mc.Group, configs: list[mc.MoeConfig], rounds: int) -> None:
    """Communicators side by side in one heap, closed in another order than they were opened."""
    import torch

    comms = [mc.MoeComm(cfg, group) for cfg in configs]
    where = on_device(comms[0])
    given = [OnGpu(make_case(cfg, group.size, 3), group.rank, where) for cfg in configs]
    for _ in range(rounds):
        received = [comm.dispatch_recv(g.send(comm)) for comm, g in zip(comms, given, strict=True)]
        outs = [
            g.combine(comm, recv.handle)
            for comm, g, recv in zip(comms, given, received, strict=True)
        ]
        torch.cuda.synchronize()
        for g, recv, out in zip(given, received, outs, strict=True):
            g.compare_received(recv)
            g.compare_out(out)
    for comm in comms:
        comm.check()
    group.barrier(60)
    for comm in comms:
        comm.close()
    with mc.MoeComm(configs[0], group) as again:
        given[0].run(again)
        group.barrier(60)


def another_host_library(group: mc.Group, cfg: mc.MoeConfig) -> str:
    """Rank 1's host library says it is of another version."""
    if group.rank == 1:
        nvshmem.host_version = lambda: (3, 8, 0)  # type: ignore[assignment]
    with pytest.raises(mc.MoecommError) as caught:
        mc.MoeComm(cfg, group)
    return f"{type(caught.value).__name__}: {caught.value}"


def chunks(group: mc.Group, cfg: mc.MoeConfig, sizes: list[int], rounds: int) -> None:
    """Puts of every size give the same bytes."""
    for size in sizes:
        os.environ["MOECOMM_NVSHMEM_CHUNK"] = str(size)
        with mc.MoeComm(cfg, group) as comm:
            assert comm.layout.remote is not None
            assert comm.layout.remote.chunk == size
            given: list[Any] = [
                OnGpu(make_case(cfg, group.size, n), group.rank, on_device(comm)) for n in range(2)
            ]
            for n in range(rounds):
                given[n % 2].run(comm)
            group.barrier(60)
