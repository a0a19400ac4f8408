"""Reuse, lifetime and several groups; see docs/reports.md, rows D."""

from __future__ import annotations

import gc
import re
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import make_case, run_case
from payload import assert_same_bits
from schedules import dispatch_arguments
from tensors import to_numpy, to_torch
from threads import run_threads

import moecomm as mc

pytestmark = pytest.mark.usefixtures("poisoned")
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")

FP8: dict[str, Any] = {"dispatch_dtype": "float8_e4m3fn", "scale_block": 16}


def config(**fields: Any) -> mc.MoeConfig:
    base = {"num_experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 4, "timeout_s": 20.0}
    return mc.MoeConfig(**{**base, **fields})


def test_d03_flags_lie_where_no_size_of_a_row_moves_them() -> None:
    first = mc.Layout(config(), 4, 0).symmetric
    for fields in ({"hidden": 4096}, {"dispatch_dtype": "float32"}, FP8, {"wire": "flags"}):
        other = mc.Layout(config(**fields), 4, 0).symmetric
        for name in ("abort", "ack", "head", "record_flag", "combine_flag"):
            assert other[name].offset == first[name].offset, (name, fields)


def test_d03_d04_layers_of_different_sizes_take_turns_on_one_group() -> None:
    """Small first, then wide, with and without scales, another cap: each has what it needs."""
    run_threads(_turns, 2)


def _turns(group: mc.Group) -> None:
    configs = [
        config(**FP8),
        config(hidden=512),
        config(max_tokens=33, combine_dtype="float32"),
        config(hidden=40, dispatch_dtype="float32", layout="grouped"),
        config(hidden=512, **FP8, layout="rank"),
    ]
    comms = [mc.MoeComm(cfg, group) for cfg in configs]
    for step in range(4):
        for comm in comms:
            run_case(comm, make_case(comm.config, 2, step))
    group.barrier(20)
    for comm in comms:
        comm.close()


def test_d04_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    run_threads(_misfits, 1)


def _misfits(group: mc.Group) -> None:
    case = make_case(config(**FP8), 1, tokens=(3,))
    x, idx, _, scale = dispatch_arguments(case, 0)
    with mc.MoeComm(case.cfg, group) as comm:
        for arguments, message in (
            ((np.zeros((3, 32), x.dtype), idx, None, scale), r"x has shape \(3, 32\)"),
            ((x, idx, None, None), "x_scale=None"),
            ((x, idx, None, scale[:2]), r"x_scale has shape \(2, 1\)"),
            ((x, idx, None, scale.astype(np.float16)), "x_scale has dtype float16"),
        ):
            with pytest.raises(mc.ConfigError, match=message):
                comm.dispatch(*arguments)
        run_case(comm, case)


def test_d05_deterministic_torch_fills_new_tensors() -> None:
    """It writes NaN into each: after the kernel, that would be the result."""
    import torch  # not at the top, where the processes of other tests would load it too

    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        run_threads(_deterministic, 2)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def _deterministic(group: mc.Group) -> None:
    case = make_case(config(), 2)
    rank = group.rank
    given = [None if a is None else to_torch(a) for a in dispatch_arguments(case, rank)]
    y, weights = to_torch(case.ys[rank]), to_torch(case.weights[rank])
    with mc.MoeComm(case.cfg, group) as comm:
        for _ in range(20):
            recv = comm.dispatch(*given)
            out = comm.combine(y, recv.handle, weights)
            assert_same_bits(to_numpy(out), case.outs[rank], "out")
        group.barrier(20)


@pytest.mark.parametrize("layout", ["batched", "grouped"])
def test_d07_experts_without_tokens(layout: str) -> None:
    """Their count is 0; whoever looks only where counts say sees nothing of the poison."""
    cfg = config(num_experts=8, top_k=1, layout=layout, expert_alignment=1, **FP8)
    case = make_case(cfg, 2, idxs=[np.zeros((4, 1), np.int32)] * 2)
    run_threads(_empty_experts, 2, case)


def _empty_experts(group: mc.Group, case: Any) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(*dispatch_arguments(case, group.rank))
        assert recv.counts.tolist() == ([8, 0, 0, 0] if group.rank == 0 else [0] * 4)
        for expert, count in enumerate(recv.counts):
            start = 0 if case.cfg.layout == "batched" else int(recv.offsets[expert])
            x = recv.x[expert] if case.cfg.layout == "batched" else recv.x
            scale = recv.x_scale[expert] if case.cfg.layout == "batched" else recv.x_scale
            assert np.isfinite(x[start : start + count].astype(np.float32)).all()
            assert np.isfinite(scale[start : start + count]).all()
        out = comm.combine(case.ys[group.rank], recv.handle, case.weights[group.rank])
        assert_same_bits(out, case.outs[group.rank], "out")
        group.barrier(20)


def test_d08_one_rank_drops_everything_and_goes_on() -> None:
    """No finaliser waits for, or tells, anybody."""
    run_threads(_drop, 3)
    mc.run(_drop, 3, timeout_s=60)


def _drop(group: mc.Group) -> None:
    case = make_case(config(), 3)
    with mc.MoeComm(config(), group) as comm:
        for step in range(6):
            run_case(comm, case)
            recv = comm.dispatch(*dispatch_arguments(case, group.rank))
            handle = recv.handle
            if step % 3 == group.rank:
                del recv
                gc.collect()
            handle.close()
        other = mc.MoeComm(config(), group)
        if group.rank == 0:
            del other
            gc.collect()
        run_case(comm, case)
        group.barrier(20)


def test_d10_the_process_group_may_go_first_last_or_never(tmp_path: Path) -> None:
    mc.run(_with_torch, 2, str(tmp_path), timeout_s=120)


def _with_torch(group: mc.Group, folder: str) -> None:
    import torch.distributed as dist

    case = make_case(config(), 2)
    for how in ("first", "last", "never"):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{how}", rank=group.rank, world_size=2
        )
        own = mc.Group.from_torch()
        comm = mc.MoeComm(config(), own)
        run_case(comm, case)
        if how == "first":
            dist.destroy_process_group()
            run_case(comm, case)
        comm.close()
        own.close()
        if how == "last":
            dist.destroy_process_group()


# ---- open and close -------------------------------------------------------------------------


def shared_mappings() -> int:
    """Bytes of this process's shared mappings: where the arenas are."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        if mode.endswith("s"):
            low, high = (int(part, 16) for part in span.split("-"))
            total += high - low
    return total


@linux
def test_d11_d12_open_and_close_many_times() -> None:
    """Random delays; nothing stays mapped or open, and the time does not grow."""
    for mapped, files, first, last in mc.run(_open_close, 2, timeout_s=90):
        assert mapped == 0
        assert files == 0
        assert last < 5 * first + 0.5


def _open_close(group: mc.Group) -> tuple[int, int, float, float]:
    own = np.random.default_rng(group.rank)
    case = make_case(config(hidden=1024), 2)
    times: list[float] = []
    base = (0, 0)
    for n in range(30):
        started = time.monotonic()
        with mc.MoeComm(case.cfg, group) as comm:
            run_case(comm, case)
            times.append(time.monotonic() - started)
            if own.random() < 0.2:
                time.sleep(own.exponential(0.01))
        gc.collect()
        if n == 4:
            base = shared_mappings(), len(list(Path("/proc/self/fd").iterdir()))
    files = len(list(Path("/proc/self/fd").iterdir()))
    return (
        shared_mappings() - base[0],
        files - base[1],
        float(np.median(times[5:15])),
        float(np.median(times[-10:])),
    )


# ---- memory that is not there ---------------------------------------------------------------


@linux
def test_d18_memory_that_does_not_fit_is_everybodys_error() -> None:
    """One rank may map 1 GiB and needs 4: a MemoryError with need and rest there, and at once an
    error on the other one that says whose and why."""
    (kind, text, seconds), (own_kind, own_text, own_seconds) = mc.run(_too_large, 2, timeout_s=60)
    assert own_kind == "OutOfMemory"
    assert re.fullmatch(
        r"this machine has \d+\.\d MiB free and 40\d\d\.\d MiB are needed; .*", own_text
    )
    assert kind == "TransportError"
    assert text == f"rank 1 failed in load: OutOfMemory: {own_text}"
    assert max(seconds, own_seconds) < 3


def _too_large(group: mc.Group) -> tuple[str, str, float]:
    cfg = config(hidden=65536, max_tokens=4096)
    assert mc.Layout(cfg, 2, 0).local.nbytes > 2**32
    if group.rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
    started = time.monotonic()
    with pytest.raises(mc.TransportError) as caught:
        mc.MoeComm(cfg, group)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started
