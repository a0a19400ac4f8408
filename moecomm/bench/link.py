"""What bounds an exchange here: bytes a second between GPUs, a flag's way, a kernel's launch."""

from __future__ import annotations

import ctypes
import importlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from moecomm.bench.timing import capture, percentile, replay_us
from moecomm.cuda_driver import PinnedMemory, attribute, call, current
from moecomm.errors import TransportError
from moecomm.group import Group
from moecomm.kernels.jit.kernel import compile_source
from moecomm.transport.nvlink import NvlinkMemory

COPY_BYTES: Final = 256 << 20
COPIES: Final = 8
ROUNDS: Final = 2000
LAUNCHES: Final = 200
_FLAG_BYTES: Final = 4096
_TIMEOUT_NS: Final = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Link:
    """Measured between GPUs of this run; ``None`` where all ranks share one.

    Attributes:
        bytes_per_s: of the copy engines, all GPUs sending at once, the slowest.
        flag_us: one way of a flag between the first GPU and another, the slowest.
        launch_us: one empty kernel in a replayed graph.
    """

    bytes_per_s: float | None
    flag_us: float | None
    launch_us: float

    def bound_us(self, dispatch_bytes: int, combine_bytes: int) -> float | None:
        """No pair can be faster: each direction sends its bytes, then a flag, from two kernels."""
        if self.bytes_per_s is None or self.flag_us is None:
            return None
        moved = (dispatch_bytes + combine_bytes) / self.bytes_per_s * 1e6
        return moved + 2 * self.flag_us + 4 * self.launch_us


class _PingPong(ctypes.Structure):
    """``PingPong`` of ping_pong.cu."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("own", "peer", "rounds", "is_first", "timeout_ns", "report")
    ]


def measure_link(group: Group, index: int) -> tuple[Link, list[str]]:
    """Measure, and say which GPU (UUID) each rank is on. Collective."""
    with NvlinkMemory(group, index) as memory:
        memory.allocate(COPY_BYTES + _FLAG_BYTES)
        uuids = [seat.uuid for seat in memory.seats]
        leaders = [uuids.index(uuid) for uuid in dict.fromkeys(uuids)]  # a rank for each GPU
        kernel = _Kernel(index)
        try:
            mine = {
                "bytes_per_s": _copy(group, memory, leaders, index),
                "flag_us": _flag(group, memory, leaders, kernel),
                "launch_us": _launch(kernel),
            }
            told = [json.loads(b) for b in group.all_gather(json.dumps(mine).encode())]
        finally:
            kernel.close()
    speeds = [m["bytes_per_s"] for m in told if m["bytes_per_s"]]
    flags = [m["flag_us"] for m in told if m["flag_us"]]
    launch_us = max(m["launch_us"] for m in told)
    return Link(min(speeds, default=None), max(flags, default=None), launch_us), uuids


class _Kernel:
    """ping_pong.cu on one GPU."""

    def __init__(self, index: int) -> None:
        arch = "sm_" + "".join(
            str(attribute(index, f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR")
        )
        text = (resources.files("moecomm.bench") / "ping_pong.cu").read_text(encoding="utf-8")
        cubin = compile_source("ping_pong.cu", text, arch).path
        self._index = index
        self.report = PinnedMemory(index, 64)
        with current(index) as cu:
            self._module = call(cu.cuModuleLoad, str(cubin).encode())
            self._function = call(cu.cuModuleGetFunction, self._module, b"ping_pong")

    def launch(self, stream: int, **fields: int) -> None:
        """Queue it; fields that are not given are 0."""
        args = _PingPong(report=self.report.address, **fields)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        with current(self._index) as cu:
            shape = (1, 1, 1, 32 if not fields else 1, 1, 1)
            where = ctypes.addressof(pointers)
            call(cu.cuLaunchKernel, self._function, *shape, 0, stream, where, 0)

    def close(self) -> None:
        with current(self._index) as cu:
            call(cu.cuModuleUnload, self._module)
        self.report.close()


def _copy(group: Group, memory: NvlinkMemory, leaders: list[int], index: int) -> float | None:
    """Bytes a second to the next GPU, all at once."""
    torch = importlib.import_module("torch")
    took = 0.0
    for turn in range(2):  # the first warms up
        group.barrier()
        if len(leaders) < 2 or group.rank not in leaders:
            continue
        peer = leaders[(leaders.index(group.rank) + 1) % len(leaders)]
        there, here = memory.peer_pointer(peer), memory.peer_pointer(group.rank)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with current(index) as cu:
            for _ in range(COPIES if turn else 1):
                stream = torch.cuda.current_stream().cuda_stream
                call(cu.cuMemcpyDtoDAsync, there, here, COPY_BYTES, stream)
        end.record()
        torch.cuda.synchronize()
        took = begin.elapsed_time(end) * 1e-3
    group.barrier()
    return COPIES * COPY_BYTES / took if took else None


def _flag(group: Group, memory: NvlinkMemory, leaders: list[int], kernel: _Kernel) -> float | None:
    """Microseconds that a flag takes from the first GPU to the others: the slowest way."""
    ways = [_flag_to(group, memory, (leaders[0], other), kernel) for other in leaders[1:]]
    return max((way for way in ways if way is not None), default=None)


def _flag_to(
    group: Group, memory: NvlinkMemory, pair: tuple[int, int], kernel: _Kernel
) -> float | None:
    """The way between two ranks; ``None`` on all but the first of them."""
    torch = importlib.import_module("torch")
    group.barrier()
    if group.rank not in pair:
        return None
    first = group.rank == pair[0]
    kernel.launch(
        torch.cuda.current_stream().cuda_stream,
        own=memory.peer_pointer(group.rank) + COPY_BYTES,
        peer=memory.peer_pointer(pair[1] if first else pair[0]) + COPY_BYTES,
        rounds=ROUNDS,
        is_first=int(first),
        timeout_ns=_TIMEOUT_NS,
    )
    torch.cuda.synchronize()
    took_ns, done = (ctypes.c_uint64 * 2).from_address(kernel.report.address)
    if done != ROUNDS:
        raise TransportError(f"flag ping-pong stopped after {done} of {ROUNDS} rounds")
    return took_ns / (ROUNDS - 1) / 2 * 1e-3 if first else None


def _launch(kernel: _Kernel) -> float:
    """Microseconds of an empty kernel in a graph of many."""
    torch = importlib.import_module("torch")

    def many() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(LAUNCHES):
            kernel.launch(stream)

    return percentile(replay_us(capture(many), 20, LAUNCHES), 50)


def rows_to_ranks(layout: Any, idx: Any) -> Any:
    """``[R, R]``: tokens of each rank that go to each rank. ``idx [R, T, K]``."""
    torch = importlib.import_module("torch")
    ends = [layout.expert_range(r).stop for r in range(layout.num_ranks)]
    owner = torch.bucketize(idx, torch.tensor(ends, device=idx.device), right=True)
    goes = [(owner == r).any(-1).sum(-1) for r in range(layout.num_ranks)]
    return torch.stack(goes, 1).cpu()


def busiest_rows(rows: Any, uuids: list[str]) -> int:
    """Most rows that one GPU must send to, or take from, other GPUs."""
    num = len(uuids)
    cross = [[uuids[a] != uuids[b] for b in range(num)] for a in range(num)]
    most = 0
    for uuid in dict.fromkeys(uuids):
        on = [r for r in range(num) if uuids[r] == uuid]
        sent = sum(int(rows[a][b]) for a in on for b in range(num) if cross[a][b])
        came = sum(int(rows[b][a]) for a in on for b in range(num) if cross[a][b])
        most = max(most, sent, came)
    return most
