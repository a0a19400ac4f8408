"""When each thread block of each stage runs: what a stage waits for, and what it holds up.

    python bench/timeline.py --tokens 512 [--layout rank] [--wire lines] [--ranks 2]

Chained pairs in a replayed graph, as ``moecomm bench`` measures them, but every block leaves the
time of its beginning, of its end, and of when all earlier kernels had ended. Of the last pair each
rank shows a line a stage: blocks, multiprocessors, and the least, median, 90th percentile and
greatest of those times, in µs since its first block began. Clocks cost about 1 %.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import numpy as np

import moecomm as mc
from moecomm.bench.options import Options
from moecomm.bench.timing import capture, percentile, replay_us
from moecomm.bench.worker import right_exchange
from moecomm.cuda_driver import call, driver
from moecomm.kernels import source

WORDS = 4  # of one block: begin, end, end of earlier kernels, multiprocessor
MOST_BLOCKS = 4096
PAIRS = 20
ENTRY = re.compile(r'extern "C" __global__ void (__launch_bounds__\([^)]*\)) (\w+)\(Args a\)')
CLOCK = f"""
__device__ unsigned long long block_clock[{WORDS * MOST_BLOCKS}];
DEVICE void note_time(u32 word)
{{
    if (threadIdx.x == 0) block_clock[blockIdx.x * {WORDS} + word] = global_timer_ns();
}}
DEVICE void note_multiprocessor()
{{
    u32 number;
    asm("mov.u32 %0, %%smid;" : "=r"(number));
    if (threadIdx.x == 0) block_clock[blockIdx.x * {WORDS} + 3] = number;
}}
"""
KERNEL = """
extern "C" __global__ void {bounds} {name}(Args a)
{{
    note_time(0);
    note_multiprocessor();
    {name}_inside(a);
    __syncthreads();
    note_time(1);
}}
"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n'
BEFORE = "// ---- programmatic dependent launch"  # of common.cuh; the clock stands there


def with_clock(name: str, text: str) -> str:
    """A device source whose kernel, if it has one, leaves its blocks' times."""
    if name == "common.cuh":
        assert text.count(WAIT) == text.count(BEFORE) == 1, "common.cuh has changed"
        return text.replace(WAIT, f"{WAIT}    note_time(2);\n").replace(BEFORE, CLOCK + BEFORE)
    entry = ENTRY.search(text)
    if entry is None:
        return text
    inside = ENTRY.sub(r"DEVICE void \2_inside(Args a)", text)
    return inside + KERNEL.format(bounds=entry[1], name=entry[2])


def summary(stage: str, words: np.ndarray[Any, Any], zero: int) -> str:
    """One line. ``words [blocks, WORDS]`` int64, times in ns."""

    def spread(times: np.ndarray[Any, Any]) -> str:
        return " ".join(f"{(t - zero) / 1e3:6.1f}" for t in np.percentile(times, [0, 50, 90, 100]))

    where = len(np.unique(words[:, 3]))
    begin, end, waited = (spread(words[:, i]) for i in range(3))
    return f"{stage:14} {len(words):5} {where:4}  {begin}  {end}  {waited}"


def main() -> None:
    parser = argparse.ArgumentParser(description="timeline of a pair's blocks, on GPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layout", default="rank")
    parser.add_argument("--reduce", default="receiver")
    parser.add_argument("--wire", default="auto")
    parser.add_argument("--input-dtype", default="float8_e4m3fn")
    given = parser.parse_args()
    options = Options(
        ranks=given.ranks, tokens=(given.tokens,), layouts=(given.layout,), reduce=given.reduce,
        wire=given.wire, input_dtypes=(given.input_dtype,),
    )  # fmt: skip
    reports = mc.run(measure, given.ranks, options, device="cuda", timeout_s=120)
    for rank, report in enumerate(reports):
        sys.stdout.write(f"rank {rank}: {report[0]:.1f} us a pair\n" + "\n".join(report[1]) + "\n")


def measure(group: mc.Group, options: Options) -> tuple[float, list[str]]:
    plain = source.load
    source.load = lambda name: with_clock(name, plain(name))  # type: ignore[assignment]
    (case,) = options.cases()
    with mc.MoeComm(options.config(case), group) as comm:
        exchange = right_exchange(comm, case, options.seed)
        graph = capture(lambda: [exchange.pair() for _ in range(PAIRS)])
        group.barrier(60)
        pair_us = percentile(replay_us(graph, 100, PAIRS), 50)
        comm.check()
        lines = _lines(comm)
        group.barrier(60)
    return pair_us, lines


def _lines(comm: mc.MoeComm) -> list[str]:
    kernels: Any = comm._runtime._kernels  # type: ignore[attr-defined]
    blocks: dict[str, np.ndarray[Any, Any]] = {}
    for (stage, _), module in zip(kernels._functions, kernels.modules, strict=True):
        words = _words(module)
        if len(words) and stage != "release":  # of dispatch_send's kernels, the one that ran
            blocks[stage] = words
    zero = int(blocks["dispatch_send"][:, 0].min())
    head = f"{'stage':14} {'blocks':>5} {'SMs':>3}  {'begin':27}  {'end':27}  earlier kernels ended"
    return [head, *(summary(stage, words, zero) for stage, words in blocks.items())]


def _words(module: Any) -> np.ndarray[Any, Any]:
    """What the blocks of a module's kernel have left: ``[blocks, WORDS]`` int64."""
    cu = driver()
    place, nbytes = call(cu.cuModuleGetGlobal, module, b"block_clock")
    words = np.zeros(nbytes // 8, np.int64)
    call(cu.cuMemcpyDtoH, words.ctypes.data, place, nbytes)
    words = words.reshape(-1, WORDS)
    return words[words[:, 0] > 0]


if __name__ == "__main__":
    main()
