"""Kernels of all cases, compiled beforehand and side by side: ranks would do it one by one."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from moecomm import cpus, env
from moecomm.bench.options import Options
from moecomm.cuda_driver import attribute
from moecomm.kernels import choice
from moecomm.kernels.jit import compile_kernel
from moecomm.kernels.stages import Variant, stage_kernels
from moecomm.layout import Layout
from moecomm.remote import Remote
from moecomm.transport import NETWORKS

logger = logging.getLogger(__name__)

MOST_PROCESSES: Final = 16


def layouts(options: Options) -> list[Layout]:
    """One for each problem among the cases. Routing makes no difference to kernels."""
    problems = {options.config(case): None for case in options.cases()}
    return [Layout(cfg, options.ranks, 0, remote(options)) for cfg in problems]


def remote(options: Options) -> Remote | None:
    """How the ranks, which are on one machine, serve each other where some pretend not to be."""
    pretended = (env.integer("NODE_SIZE", 1) or options.ranks) < options.ranks
    network = options.transport in NETWORKS
    return Remote(mode="proxied", bounce=True) if network and pretended else None


def variants(wanted: Iterable[Layout]) -> list[Variant]:
    """Every kernel that communicators of these layouts launch."""
    return [
        Variant("ahead", stage, layout, code)
        for layout in wanted
        for stage, code in stage_kernels(layout)
    ]


def compile_ahead(wanted: Iterable[Layout], kernels: str = "auto") -> None:
    """Put all kernels into the cache that the ranks share. ``kernels``: as ``MoeComm``'s.

    Raises:
        CompileError: one does not compile.
    """
    began = time.monotonic()
    tasks = variants(wanted)
    processes = max(1, min(MOST_PROCESSES, len(cpus.allowed()), len(tasks)))
    # Processes of their own: the compiler holds the interpreter's lock, and looking at the GPU
    # here would keep a context of this process on it.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        arch = pool.submit(_arch).result()
        for _ in pool.map(_compile, tasks, [arch] * len(tasks), [kernels] * len(tasks)):
            pass
    took = time.monotonic() - began
    logger.info("%d kernels for %s ready after %.1f s", len(tasks), arch, took)


def _arch() -> str:
    return "sm_" + "".join(
        str(attribute(0, f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR")
    )


def _compile(variant: Variant, arch: str, kernels: str) -> None:
    if choice.choose(kernels) is None:
        compile_kernel(variant.source, variant.defines, arch)
        return
    from moecomm.kernels.numba_jit.gpu import compile_variant

    compile_variant(kernels, variant, arch)
