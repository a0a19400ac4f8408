"""What ranks do in the tests of several processes on GPUs; imported by each of them."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np
import pytest
from exchange import make_case
from gpu_exchange import OnGpu, delay, on_device

import moecomm as mc
from moecomm import cuda_driver


def exchange_all(
    group: mc.Group, configs: list[tuple[mc.MoeConfig, str | None]], rounds: int, device: Any = None
) -> None:
    """Every configuration in turn, with random lengths of everything in between."""
    for cfg, input_dtype in configs:
        try:
            _exchange(group, cfg, input_dtype, rounds, device)
        except Exception as error:
            error.add_note(f"with {cfg}")
            raise


def _exchange(
    group: mc.Group, cfg: mc.MoeConfig, input_dtype: str | None, rounds: int, device: Any
) -> None:
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        cases = [
            make_case(cfg, group.size, seed, input_dtype=input_dtype, skew=0.3 * (seed % 2))
            for seed in range(3)
        ]
        ready = [OnGpu(case, group.rank, where) for case in cases]
        sleep = delay(50_000, group.rank)
        for step in range(rounds):
            given = ready[step % len(ready)]
            sleep()
            recv = comm.dispatch_recv(given.send(comm))
            sleep()
            out = given.combine(comm, recv.handle)
            given.compare_received(recv)
            given.compare_out(out)
        torch.cuda.synchronize()
        comm.check()
        group.barrier(60)


def overlap(group: mc.Group, cfg: mc.MoeConfig, rounds: int, device: Any = None) -> None:
    """C04: two handles under way on two streams that nobody orders."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as comm:
        where = on_device(comm)
        given = [OnGpu(make_case(cfg, group.size, seed), group.rank, where) for seed in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        sleep = delay(50_000, group.rank)
        for _ in range(rounds):
            for stream in streams:
                with torch.cuda.stream(stream):
                    sleep()
            handles = [g.send(comm, stream=s) for g, s in zip(given, streams, strict=True)]
            received = [
                comm.dispatch_recv(h, stream=s)
                for h, s in zip(handles, reversed(streams), strict=True)
            ]
            outs = [
                g.combine(comm, h, stream=s)
                for g, h, s in zip(given, handles, streams, strict=True)
            ]
            torch.cuda.synchronize()
            for one, recv, out in zip(given, received, outs, strict=True):
                one.compare_received(recv)
                one.compare_out(out)
        comm.check()
        group.barrier(60)


def die_or_survive(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> tuple[str, int, float]:
    """Rank 1 is killed after a dispatch; what the others see, and how fast."""
    given, where = warmed_up(group, cfg, device)
    comm = mc.MoeComm(cfg, group, device=device)
    given.run(comm)
    group.barrier(60)
    if group.rank == 1:
        given.send(comm)
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    error = until_timeout(comm, given)
    waited = time.monotonic() - started
    comm.close()
    use_again(group.subgroup([group.rank]), cfg, where)
    return error.phase, error.peer, waited


def be_silent(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> tuple[str, int] | None:
    """Rank 1 does not take part; then all ranks go on with a communicator of their own."""
    given, where = warmed_up(group, cfg, device)
    comm = mc.MoeComm(cfg, group, device=device)
    error = None if group.rank == 1 else until_timeout(comm, given)
    group.barrier(60)
    if group.rank == 1:  # the others have told it
        with pytest.raises(mc.PeerTimeout):
            _until(comm, given)
    comm.close()
    use_again(group, cfg, where)
    return None if error is None else (error.phase, error.peer)


def warmed_up(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> tuple[OnGpu, str]:
    """Everything that a first step loads or compiles, on all ranks, before time counts: a rank
    whose start takes longer than ``cfg.timeout_s`` would be somebody's culprit."""
    patient = dataclasses.replace(cfg, timeout_s=60.0)
    with mc.MoeComm(patient, group, device=device) as comm:
        where = on_device(comm)
        given = OnGpu(make_case(cfg, group.size, 0), group.rank, where)
        given.run(comm)
        group.barrier(60)
    return given, where


def use_again(group: mc.Group | None, cfg: mc.MoeConfig, where: str) -> None:
    """The process, its context and its memory are as good as ever."""
    import torch

    assert group is not None
    assert torch.ones(64, 64, device=where).matmul(torch.ones(64, 64, device=where))[0, 0] == 64
    patient = dataclasses.replace(cfg, timeout_s=60.0)
    with mc.MoeComm(patient, group, device=where) as comm:
        OnGpu(make_case(cfg, group.size, 1), group.rank, where).run(comm)
        group.barrier(60)


def until_timeout(comm: mc.MoeComm, given: OnGpu) -> mc.PeerTimeout:
    """The error that must come."""
    with pytest.raises(mc.PeerTimeout) as caught:
        _until(comm, given)
    return caught.value


def _until(comm: mc.MoeComm, given: OnGpu) -> None:
    """Steps until an error; what they give is not looked at."""
    import torch

    for _ in range(20):
        recv = comm.dispatch_recv(given.send(comm))
        given.combine(comm, recv.handle)
        torch.cuda.synchronize()
        comm.check()


def open_and_close(group: mc.Group, cfg: mc.MoeConfig, times: int, device: Any) -> None:
    """D11, D12: memory comes back, whoever closes first, and it is no slower each time."""
    import torch

    rng = np.random.default_rng(group.rank)
    base, first, took = 0, 0.0, 0.0
    for n in range(times):
        group.barrier(60)
        started = time.monotonic()
        comm = mc.MoeComm(cfg, group, device=device)
        took = time.monotonic() - started
        where = on_device(comm)
        OnGpu(make_case(cfg, group.size, n), group.rank, where).run(comm)
        time.sleep(float(rng.random()) * 0.02)
        comm.close()
        torch.cuda.empty_cache()
        group.barrier(60)
        free = cuda_driver.free_bytes(torch.cuda.current_device())
        group.barrier(60)
        if n == 2:  # torch and the driver have taken what they keep
            base, first = free, took
        if n > 2:
            assert abs(free - base) < 16 << 20, f"round {n}: {base - free} bytes are gone"
            assert took < 10 * first + 2
    group.barrier(60)


def measure_memory(group: mc.Group, cfg: mc.MoeConfig, device: Any) -> tuple[int, int, int]:
    """H07: bytes taken, bytes stated, and what 100 steps add."""
    import torch

    with mc.MoeComm(cfg, group, device=device) as warm_up:  # context, modules, torch's own
        given = OnGpu(make_case(cfg, group.size, 0), group.rank, on_device(warm_up))
        given.run(warm_up)
        group.barrier(60)
    index = torch.cuda.current_device()
    torch.cuda.synchronize()
    group.barrier(60)
    before = cuda_driver.free_bytes(index)
    group.barrier(60)
    with mc.MoeComm(cfg, group, device=device) as comm:
        group.barrier(60)
        taken = before - cuda_driver.free_bytes(index)
        group.barrier(60)
        for _ in range(100):
            given.run(comm)
        group.barrier(60)
        grown = before - cuda_driver.free_bytes(index) - taken
        group.barrier(60)
        return taken, comm.memory_bytes, grown


def run_out_of_memory(group: mc.Group, cfg: mc.MoeConfig) -> tuple[str, str]:
    """D18: rank 1 has 1 GiB left."""
    import torch

    index = group.rank
    torch.cuda.set_device(index)
    hog = None
    if group.rank == 1:
        left = cuda_driver.free_bytes(index) - (1 << 30)
        hog = torch.empty(left, dtype=torch.uint8, device=f"cuda:{index}")
    with pytest.raises(mc.TransportError) as caught:
        mc.MoeComm(cfg, group, device=f"cuda:{index}")
    del hog
    torch.cuda.empty_cache()
    return type(caught.value).__name__, str(caught.value)


def see_one_gpu(
    group: mc.Group, visible: list[str], configs: list[tuple[mc.MoeConfig, str | None]]
) -> str:
    """F02: each process has its own idea of which GPU is number 0."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[group.rank]
    exchange_all(group, configs, 6)
    return cuda_driver.device_uuid(cuda_driver.current_device() or 0)


def beside_the_current_device(group: mc.Group, cfg: mc.MoeConfig) -> None:
    """F03: tensors and communicator on one device, another one current."""
    import torch

    other = 1 - group.rank
    with mc.MoeComm(cfg, group, device=f"cuda:{group.rank}") as comm:
        torch.cuda.set_device(group.rank)
        given = OnGpu(make_case(cfg, group.size, 0), group.rank, f"cuda:{group.rank}")
        torch.cuda.synchronize()
        torch.cuda.set_device(other)
        for _ in range(5):
            given.run(comm)
            assert torch.cuda.current_device() == other
        comm.stats()
        comm.check()
        assert torch.cuda.current_device() == other
        group.barrier(60)
    assert torch.cuda.current_device() == other


def uuids(group: mc.Group) -> list[str]:
    return [cuda_driver.device_uuid(n) for n in range(cuda_driver.device_count())]
