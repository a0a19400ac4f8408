"""Many kernels at once, in several processes that share the cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from moecomm.errors import CompileError
from moecomm.kernels.jit.kernel import Compiled, compile_kernel


@dataclass(frozen=True, slots=True)
class Task:
    """One cubin to make: a source of the package with its defines.

    ``label`` and ``detail`` say what it is for: the problem, and what sets it apart from other
    kernels of the same source. ``make`` compiles it where that is not a matter of source and
    defines; it must be picklable.
    """

    label: str
    detail: str
    source: str
    defines: Mapping[str, int | str]
    arch: str
    make: Callable[[], Compiled] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: a cubin, or why there is none."""

    task: Task
    compiled: Compiled | None
    error: CompileError | None = None


def compile_all(tasks: Sequence[Task], jobs: int) -> Iterator[Outcome]:
    """Compile ``tasks`` in ``jobs`` processes; yields each outcome when it is there.

    Processes rather than threads: NVRTC and nvJitLink work on one program at a time in a process
    (144 kernels took 44 s in one thread and 48 s in two, CUDA 13.0, 2026-11-29).
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(_compile, tasks)
        return
    # Not fork: the caller may have threads, and the children need none of its memory.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        for future in as_completed([pool.submit(_compile, task) for task in tasks]):
            yield future.result()


def _compile(task: Task) -> Outcome:
    try:
        if task.make is not None:
            compiled = task.make()
        else:
            compiled = compile_kernel(task.source, task.defines, task.arch)
        compiled.require_report()
        return Outcome(task, compiled)
    except CompileError as error:
        return Outcome(task, None, error)
