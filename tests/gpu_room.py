"""What ranks do in the tests of multiprocessors that others hold, and of very large batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exchange import make_case
from gpu_exchange import OnGpu, on_device

import moecomm as mc
from moecomm.bench import nccl

LARGEST = 131072
HIDDEN = 64
# Every block takes half a multiprocessor, waits until it is told, and for ten seconds at most.
HOLD = r"""
extern "C" __global__ void hold(volatile unsigned* over, unsigned* began)
{
    extern __shared__ char room[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    if (threadIdx.x == 0) {
        atomicAdd_system(began, 1);
        do
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        while (!*over && now - start < 10000000000ull);
    }
    __syncthreads();
}
"""
HALF_OF_SHARED = 100 * 1024


@contextmanager
def held(free_halves: int) -> Iterator[None]:
    """All of the GPU's multiprocessors but so many halves are taken."""
    import cupy as cp
    import numpy as np

    pinned = cp.cuda.alloc_pinned_memory(8)
    over, began = np.frombuffer(pinned, np.uint32, 2)[:1], np.frombuffer(pinned, np.uint32, 2)[1:]
    over[:], began[:] = 0, 0
    count = 2 * cp.cuda.Device().attributes["MultiProcessorCount"] - free_halves
    kernel = cp.RawKernel(HOLD, "hold")
    kernel.max_dynamic_shared_size_bytes = HALF_OF_SHARED
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        kernel((count,), (1024,), (pinned.ptr, pinned.ptr + 4), shared_mem=HALF_OF_SHARED)
    try:
        while began[0] < count:
            assert not stream.done, f"{began[0]} of {count} blocks have begun"
        yield
        assert not stream.done, "they were not held for long enough"
    finally:
        over[:] = 1
        stream.synchronize()


def exchange_beside(group: mc.Group, cfg: mc.MoeConfig, rounds: int, free_halves: int) -> None:
    """C09: with few multiprocessors left, of which nobody has told us."""
    import cupy as cp
    import torch

    with mc.MoeComm(cfg, group) as comm:
        where = on_device(comm)
        given = [
            OnGpu(make_case(cfg, group.size, n, skew=0.3 * n), group.rank, where) for n in (0, 1)
        ]
        for one in given:
            one.run(comm)
        torch.cuda.synchronize()
        group.barrier(60)
        stream = torch.cuda.Stream()  # the default stream would wait for those who hold
        with cp.cuda.Device(comm.device[1]), torch.cuda.stream(stream), held(free_halves):
            for n in range(rounds):
                given[n % 2].run(comm)
            stream.synchronize()
            comm.check()
            group.barrier(60)


def gather_in_another_order(group: mc.Group, cfg: mc.MoeConfig, rounds: int) -> None:
    """C05: even ranks gather before they dispatch, odd ones after, on another stream."""
    import torch

    with mc.MoeComm(cfg, group) as comm:
        where = on_device(comm)
        given = OnGpu(make_case(cfg, group.size, 0), group.rank, where)
        side = torch.cuda.Stream()
        mine = torch.full((4 << 20,), group.rank + 1, device=where)
        found = torch.zeros(group.size * len(mine), dtype=mine.dtype, device=where)
        expected = torch.arange(1, group.size + 1, device=where).repeat_interleave(len(mine))
        with nccl.process_group(group, comm.device[1]) as distributed:

            def gather() -> None:
                with torch.cuda.stream(side):
                    found.zero_()
                    distributed.all_gather_into_tensor(found, mine)

            for _ in range(rounds):
                if group.rank % 2 == 0:
                    gather()
                handle = given.send(comm)
                if group.rank % 2:
                    gather()
                given.compare_received(comm.dispatch_recv(handle))
                given.compare_out(given.combine(comm, handle))
                side.synchronize()
                assert torch.equal(found, expected)
            comm.check()
            group.barrier(60)


def payload(ids: Any) -> Any:
    """``[n, HIDDEN]`` float32, integers that bfloat16 holds: three neighbours tell the row."""
    import torch

    column = torch.arange(HIDDEN, device=ids.device)
    return (ids[:, None] >> 7 * (column % 3)) % 128 + column.float()


def sweep(group: mc.Group) -> None:
    """C07: one communicator, T = 1, 2, 4, ... 131072 and back."""
    import torch

    cfg = mc.MoeConfig(
        num_experts=4, top_k=1, hidden=HIDDEN, max_tokens=LARGEST, layout="grouped",
        combine_dtype="float32", timeout_s=20.0,
    )  # fmt: skip
    powers = range(LARGEST.bit_length())
    local = cfg.num_experts // group.size
    with mc.MoeComm(cfg, group) as comm:
        where, first = on_device(comm), comm.expert_range(group.rank).start
        for step, tokens in enumerate(2**power for power in [*powers, *reversed(powers)]):
            ids = group.rank * LARGEST + torch.arange(tokens, device=where)
            idx = ((ids * 7 + step) % 4).int()[:, None]
            recv = comm.dispatch(payload(ids).bfloat16(), idx)
            rows = int(recv.num_rows[0])
            assert rows == int(recv.counts.sum())
            source = LARGEST * recv.src_rank[:rows].long() + recv.src_token[:rows]
            assert torch.equal(recv.x[:rows].float(), payload(source)), f"{tokens} tokens"
            y = torch.zeros(comm.layout.recv_shape, device=where)
            y[:rows] = recv.x[:rows].float() + first
            out = comm.combine(y, recv.handle, torch.full((tokens, 1), 2.0, device=where))
            owner = idx // local * local  # each rank adds its first expert's number
            assert torch.equal(out, 2 * (payload(ids) + owner)), f"{tokens} tokens"
        comm.check()
        group.barrier(60)
