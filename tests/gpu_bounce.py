"""What ranks do in the tests of a bounce on GPUs; imported by each of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from exchange import make_case
from gpu_exchange import OnGpu, on_device
from gpu_graphs import vars_of
from gpu_ranks import until_timeout, use_again, warmed_up
from proxied_faults import FAULTS

import moecomm as mc

KEPT: list[Any] = []  # until the process ends


class Work:
    """Some hundred microseconds of matrix products on the current stream, checked."""

    def __init__(self, device: str) -> None:
        import torch

        torch.manual_seed(1)
        self.a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
        self.product = self.a
        self()
        self.expected = self.product.clone()

    def __call__(self) -> None:
        self.product = self.a
        for _ in range(20):
            self.product = (self.product @ self.a) / 64

    def compare(self) -> None:
        import torch

        assert torch.equal(self.product, self.expected)


class Overlapped(OnGpu):
    """An exchange with work between the halves."""

    work: Work

    def exchange(self, comm: mc.MoeComm) -> tuple[mc.Received, Any]:
        handle = self.send(comm)
        self.work()
        recv = comm.dispatch_recv(handle)
        kept = {n: None if v is None else v.clone() for n, v in vars_of(recv).items()}
        comm.combine_send(self.y, handle)
        self.work()
        later = None if self.case.weights_at_dispatch else self.weights
        return mc.Received(handle=handle, **kept), comm.combine_recv(handle, later)

    def compare(self, recv: mc.Received, out: Any) -> None:
        self.compare_received(recv)
        self.compare_out(out)
        self.work.compare()


def between(group: mc.Group, cfg: mc.MoeConfig, rounds: int) -> None:
    """Work between halves, eagerly and in a graph, in turn."""
    import torch

    with mc.MoeComm(cfg, group) as comm:
        where = on_device(comm)
        cases = [
            make_case(cfg, group.size, n, tokens=[cfg.max_tokens] * group.size) for n in (0, 1)
        ]
        given = [Overlapped(case, group.rank, where) for case in cases]
        graphs = []
        for one in given:
            one.work = Work(where)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                recv, out = one.exchange(comm)
            graphs.append((graph, recv, out))
        for n in range(rounds):
            one, (graph, recv, out) = given[n % 2], graphs[n % 2]
            if n % 3:
                recv, out = one.exchange(comm)
            else:
                graph.replay()
            one.compare(recv, out)
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def come_late(group: mc.Group, cfg: mc.MoeConfig) -> float:
    """Rank 1 sends long after the others. How long the device of those was busy waiting for it."""
    import torch

    with mc.MoeComm(cfg, group) as comm:
        given = OnGpu(make_case(cfg, group.size, 0), group.rank, on_device(comm))
        given.run(comm)
        torch.cuda.synchronize()
        group.barrier(60)
        waited = 0.0
        if group.rank != 1:
            handle = given.send(comm)
            started = time.monotonic()
            torch.cuda.synchronize()
            waited = time.monotonic() - started
        group.barrier(60)
        if group.rank == 1:
            handle = given.send(comm)
        given.compare_received(comm.dispatch_recv(handle))
        given.compare_out(given.combine(comm, handle))
        given.run(comm)
        comm.check()
        group.barrier(60)
        return waited


def give_up(group: mc.Group, cfg: mc.MoeConfig) -> tuple[int, float]:
    """Rank 1 takes no part. The others have one handle more under way than they receive, and close
    nothing. Whom each names, and after how long its device is free."""
    import torch

    given, _ = warmed_up(group, cfg, None)
    comm = mc.MoeComm(cfg, group)
    given.run(comm)
    torch.cuda.synchronize()
    group.barrier(60)
    peer, waited = 1, 0.0
    if group.rank != 1:
        started = time.monotonic()
        handles = [given.send(comm) for _ in range(2)]
        comm.dispatch_recv(handles[0])
        torch.cuda.synchronize()
        waited = time.monotonic() - started
        with pytest.raises(mc.PeerTimeout) as caught:
            comm.check()
        peer = caught.value.peer
    group.barrier(60)
    return peer, waited


def break_down(group: mc.Group, cfg: mc.MoeConfig, fault: str) -> tuple[int, str, float, float]:
    """Something happens to rank 1's mover. Whom this rank names, and why; how long that took, and
    closing; then the process goes on."""
    given, where = warmed_up(group, cfg, None)
    comm = mc.MoeComm(cfg, group)
    given.run(comm)
    group.barrier(60)
    if group.rank == 1:
        FAULTS[fault](comm)
    started = time.monotonic()
    error = until_timeout(comm, given)
    failed = time.monotonic()
    comm.close()
    closed = time.monotonic()
    group.barrier(60)
    use_again(group, cfg, where)
    return error.peer, str(error.__cause__), failed - started, closed - failed


def leave(group: mc.Group, cfg: mc.MoeConfig) -> int:
    """Processes end that close nothing, with a stream that waits for what nobody sends."""
    given, _ = warmed_up(group, cfg, None)
    comm = mc.MoeComm(cfg, group)
    given.run(comm)
    group.barrier(60)
    if group.rank != 1:
        KEPT.append(given.send(comm))
    KEPT.append(comm)
    return group.rank
