"""What ranks do in the tests of CUDA graphs; imported by each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case
from gpu_exchange import OnGpu, bits, delay, on_device

import moecomm as mc

SIZES = (1, 8, 64)


class Graph:
    """One exchange of fixed size, captured. ``given`` is what it reads; see ``load``."""

    def __init__(self, comm: mc.MoeComm, given: OnGpu, *, num_tokens: Any = None) -> None:
        import torch

        self.given = given
        self.num_tokens = num_tokens
        self.out = torch.empty_like(given.out)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            handle = given.send(comm, num_tokens=num_tokens)
            self.recv = comm.dispatch_recv(handle)
            # The rows move out: what stands in the workspace belongs to the next exchange.
            self.kept = {
                name: None if array is None else array.clone()
                for name, array in vars_of(self.recv).items()
            }
            given.combine(comm, handle, out=self.out)

    def load(self, other: OnGpu) -> None:
        """Give the graph the inputs of another case of the same size."""
        for name in ("x", "idx", "weights", "scale", "y"):
            ours, theirs = getattr(self.given, name), getattr(other, name)
            if ours is not None:
                bits_or_int64(ours)[: len(theirs)].copy_(bits_or_int64(theirs))

    def replay_and_compare(self, wanted: OnGpu) -> None:
        self.graph.replay()
        kept = mc.Received(handle=self.recv.handle, **self.kept)
        wanted.compare_received(kept)
        wanted.compare_out(self.out[: len(wanted.out)])


def vars_of(recv: mc.Received) -> dict[str, Any]:
    names = (
        "x", "x_scale", "counts", "offsets", "num_rows", "src_rank", "src_token",
        "topk_weights", "topk_idx",
    )  # fmt: skip
    return {name: getattr(recv, name) for name in names}


def bits_or_int64(array: Any) -> Any:
    return array if array.element_size() == 8 else bits(array)


def cases(cfg: mc.MoeConfig, num_ranks: int, tokens: int, count: int, **options: Any) -> list[Case]:
    groups = num_ranks // cfg.replicas
    return [
        make_case(cfg, num_ranks, seed, tokens=[tokens] * groups, **options)
        for seed in range(count)
    ]


def first_call_is_captured(
    group: mc.Group, cfg: mc.MoeConfig, input_dtype: str | None, device: Any
) -> None:
    """Nothing has run before the capture; then replays with new inputs, eager calls between."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        ready = [
            OnGpu(case, group.rank, where)
            for case in cases(cfg, group.size, cfg.max_tokens, 4, input_dtype=input_dtype)
        ]
        graph = Graph(comm, OnGpu(ready[0].case, group.rank, where))
        for step in range(12):
            graph.load(ready[step % 4])
            graph.replay_and_compare(ready[step % 4])
            if step % 3 == 0:
                ready[(step + 1) % 4].run(comm)
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def sizes_interleave(group: mc.Group, cfg: mc.MoeConfig, rounds: int, device: Any) -> None:
    """E04: graphs of several sizes and eager calls, in random order, on one communicator."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        ready = {
            size: [OnGpu(c, group.rank, where) for c in cases(cfg, group.size, size, 3)]
            for size in SIZES
        }
        graphs = {
            size: Graph(comm, OnGpu(given[0].case, group.rank, where))
            for size, given in ready.items()
        }
        together = np.random.default_rng(7)  # all ranks take the same steps
        sleep = delay(50_000, group.rank)
        for _ in range(rounds):
            size, which = int(together.choice(SIZES)), int(together.integers(3))
            given = ready[size][which]
            sleep()
            if together.random() < 0.3:
                given.run(comm)
                continue
            graphs[size].load(given)
            sleep()
            graphs[size].replay_and_compare(given)
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def tokens_on_the_device(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> None:
    """One graph for all sizes: rows from ``num_tokens`` on do not exist, whatever they hold."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        full = OnGpu(cases(cfg, group.size, cfg.max_tokens, 1)[0], group.rank, where)
        number = torch.zeros(1, dtype=torch.int32, device=where)
        graph = Graph(comm, full, num_tokens=number)
        for tokens in (5, 0, cfg.max_tokens, 1, 17):
            given = OnGpu(cases(cfg, group.size, tokens, 1)[0], group.rank, where)
            full.x.fill_(float("nan"))
            full.idx.fill_(10**6)
            full.weights.fill_(float("nan"))
            graph.load(given)
            graph.out.fill_(7.0)
            number.fill_(tokens)
            graph.replay_and_compare(given)
            assert (graph.out[tokens:] == 7.0).all()
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def pieces_across_streams(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> None:
    """E05: a graph a half, captured on one stream, replayed on another, eager work between."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        given = OnGpu(cases(cfg, group.size, cfg.max_tokens, 1)[0], group.rank, where)
        out = torch.empty_like(given.out)
        pieces = [torch.cuda.CUDAGraph() for _ in range(4)]
        with torch.cuda.graph(pieces[0]):
            handle = given.send(comm)
        with torch.cuda.graph(pieces[1]):
            recv = comm.dispatch_recv(handle)
        with torch.cuda.graph(pieces[2]):
            comm.combine_send(given.y, handle)
        with torch.cuda.graph(pieces[3]):
            later = None if given.case.weights_at_dispatch else given.weights
            comm.combine_recv(handle, later, out=out)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                out.zero_()
                for number, piece in enumerate(pieces):
                    piece.replay()
                    if number == 1:
                        given.compare_received(recv)
                given.compare_out(out)
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def host_errors_leave_a_capture_alone(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> None:
    """E01: an argument that is refused during a capture does not spoil it."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        given = OnGpu(cases(cfg, group.size, 4, 1)[0], group.rank, where)
        out = torch.empty_like(given.out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(mc.ConfigError):
                comm.dispatch_send(given.x[:2], given.idx)
            handle = given.send(comm)
            comm.dispatch_recv(handle)
            given.combine(comm, handle, out=out)
        graph.replay()
        given.compare_out(out)
        group.barrier(60)
