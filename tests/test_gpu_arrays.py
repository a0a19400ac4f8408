"""Arrays on GPUs as callers hand them over: empty, not filled yet, of another GPU."""

from __future__ import annotations

import pytest
from exchange import make_case
from gpu_exchange import OnGpu, on_device

import moecomm as mc

CFG = mc.MoeConfig(num_experts=8, top_k=2, hidden=256, max_tokens=64, num_sms=16)
LONG = 100_000_000  # cycles of the GPU, 50 ms
one_gpu, two_gpus = pytest.mark.gpu, pytest.mark.gpus(2)


def run(fn: object, num_ranks: int) -> None:
    mc.run(fn, num_ranks, device="cuda", timeout_s=120)


@one_gpu
def test_g06_no_tokens_at_all() -> None:
    run(_without_tokens, 1)


def _without_tokens(group: mc.Group) -> None:
    import torch

    with mc.MoeComm(CFG, group) as comm:
        where = on_device(comm)
        recv = comm.dispatch(
            torch.empty(0, CFG.hidden, dtype=torch.bfloat16, device=where),
            torch.empty(0, CFG.top_k, dtype=torch.int32, device=where),
        )
        assert recv.counts.tolist() == [0] * CFG.num_experts
        y = torch.zeros(comm.layout.recv_shape, dtype=torch.bfloat16, device=where)
        out = comm.combine(y, recv.handle, torch.empty(0, CFG.top_k, device=where))
        assert (tuple(out.shape), out.dtype) == ((0, CFG.hidden), torch.bfloat16)
        comm.check()


@one_gpu
@pytest.mark.parametrize("side", [False, True], ids=["default-stream", "side-stream"])
def test_g07_a_long_kernel_writes_what_is_dispatched(side: bool) -> None:
    run(_beside if side else _behind, 1)


def _behind(group: mc.Group) -> None:
    _long_before(group, side=False)


def _beside(group: mc.Group) -> None:
    _long_before(group, side=True)


def _long_before(group: mc.Group, side: bool) -> None:
    """Inputs and ``y`` hold something else until long after the call."""
    import torch

    with mc.MoeComm(CFG, group) as comm:
        given = OnGpu(make_case(CFG, group.size, 0), group.rank, on_device(comm))
        given.run(comm)
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            true = [given.x.clone(), given.idx.clone(), given.y.clone()]
            held = [given.x, given.idx, given.y]
            for array in held:
                array.zero_()
            torch.cuda._sleep(LONG)
            for array, value in zip(held[:2], true[:2], strict=True):
                array.copy_(value)
            recv = comm.dispatch_recv(given.send(comm))
            torch.cuda._sleep(LONG)
            given.y.copy_(true[2])
            out = given.combine(comm, recv.handle)
            assert not stream.query(), "the long kernel was over before the calls were"
            given.compare_received(recv)
            given.compare_out(out)
        comm.check()


@two_gpus
def test_b12_an_array_of_another_gpu_is_named_before_anything_is_sent() -> None:
    run(_on_the_other_gpu, 2)


def _on_the_other_gpu(group: mc.Group) -> None:
    with mc.MoeComm(CFG, group) as comm:
        where = on_device(comm)
        other = f"cuda:{1 - comm.device[1]}"
        given = OnGpu(make_case(CFG, group.size, 0), group.rank, where)
        mine, given.x = given.x, given.x.to(other)
        with pytest.raises(mc.ConfigError, match=f"^x is on {other}: must be on {where}"):
            given.send(comm)
        given.x = mine
        handle = given.send(comm)
        given.compare_received(comm.dispatch_recv(handle))
        right, given.y = given.y, given.y.to(other)
        with pytest.raises(mc.ConfigError, match=f"^y is on {other}: must be on {where}"):
            given.combine(comm, handle)
        given.y = right
        given.compare_out(given.combine(comm, handle))
        comm.check()
        group.barrier(60)
