"""Would the tests notice a mistake in the kernels in Python? One at a time, each must be found.

As ``test_mutations.py`` for the CUDA C++ kernels, whose settings these are; the right kernels pass
them in ``test_numba_kernels.py``. The faulty ones run in another process, since they may also
write anywhere.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import test_mutations as mutations
from test_mutations import SEEDS, Mutation

import moecomm as mc
from moecomm.kernels.numba_jit import sources

MUTATIONS = {
    "count-published-before-it-is-complete": Mutation(
        "routing.py",
        "    count_tokens(a, tokens)\n    sync_block()\n",
        "    count_tokens(a, tokens)\n",
    ),
    "record-flag-not-released": Mutation(
        "dispatch_send.py", "store_release(shared_i64(FLAGS", "store_relaxed(shared_i64(FLAGS"
    ),
    "flag-before-its-data": Mutation(
        "dispatch_send.py",
        "    send_row(a, t, num_dest)\n",
        "    if thread_id() < num_dest:\n"
        "        store_release(shared_i64(FLAGS + 8 * thread_id()), epoch)\n"
        "    send_row(a, t, num_dest)\n",
    ),
    "no-barrier-before-the-record-flag": Mutation(
        "dispatch_send.py",
        "    sync_block()  # every thread's part of the records comes before their flags\n",
        "",
    ),
    "no-barrier-after-the-plan": Mutation(
        "dispatch_send.py", "    sync_block()  # the plan is made\n", ""
    ),
    "reuse-before-acknowledgement": Mutation(
        "routing.py",
        "return wait_for_flag(a, flag, last, epoch, DISPATCH_SEND",
        "return wait_for_flag(a, flag, 0, epoch, DISPATCH_SEND",
        setting="sparse",
    ),
    "acknowledgement-of-the-wrong-epoch": Mutation(
        "protocol.py",
        "store_release(ack_flag(a, peer_base(a, r), a.rank), epoch)",
        "store_release(ack_flag(a, peer_base(a, r), a.rank), epoch + 1)",
        setting="sparse",
    ),
    "acknowledgement-not-released": Mutation(
        "protocol.py",
        "store_release(ack_flag(a, peer_base(a, r), a.rank), epoch)",
        "store_relaxed(ack_flag(a, peer_base(a, r), a.rank), epoch)",
        setting="uncombined",
    ),
    "head-not-released": Mutation(
        "routing.py", "store_release(flag, value)", "store_relaxed(flag, value)", setting="replicas"
    ),
    "wait-without-acquire": Mutation(
        "waits.py",
        "        word = load_acquire(flag)\n        came = word >= wanted",
        "        word = load_relaxed(flag)\n        came = word >= wanted",
    ),
    "stale-epoch-accepted": Mutation(
        "dispatch_recv.py",
        "wait_for_flag(a, flag, epoch, epoch, DISPATCH_RECV",
        "wait_for_flag(a, flag, epoch - 1, epoch, DISPATCH_RECV",
    ),
    "flag-acquired-by-one-lane-only": Mutation(
        "dispatch_recv.py", "    sync_warp()  # what lane 0 acquired holds for all\n", ""
    ),
    "plan-overwritten-while-it-is-read": Mutation(
        "dispatch_recv.py", "    sync_block()  # nobody still reads the plan\n", ""
    ),
    "rows-placed-before-the-heads": Mutation(
        "placement.py",
        "if needs_counts() and not heads_arrived(",
        "if CAPPED and not heads_arrived(",
    ),
    "combine-flag-not-released": Mutation(
        "combine_send.py", "store_release(combine_flag(", "store_relaxed(combine_flag("
    ),
    "no-barrier-before-the-combine-flag": Mutation(
        "combine_send.py",
        "    sync_block()  # every thread's part of the rows comes before their flags\n",
        "",
        setting="sender",
    ),
    "combine-stale-epoch-accepted": Mutation(
        "combine_recv.py",
        "wait_for_flag(a, flag, epoch, epoch, COMBINE_RECV",
        "wait_for_flag(a, flag, epoch - 1, epoch, COMBINE_RECV",
    ),
    "list-overwritten-while-it-is-read": Mutation(
        "combine_recv.py", "        sync_block()  # nobody still reads the list\n", ""
    ),
}  # fmt: skip


class Worker:
    """A process that is replaced when a faulty kernel has killed it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def first_seed_that_fails(self, mutation: Mutation, text: str) -> int | None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(_first_seed_that_fails, mutation, text).result()
        except BrokenProcessPool:
            self.close()
            return 0

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_KERNELS", "numba")
        made = Worker()
        yield made
        made.close()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(name: str, worker: Worker) -> None:
    mutation = MUTATIONS[name]
    right = sources.load(sources.PACKAGE / mutation.name)
    assert right.count(mutation.right) == 1, "the kernel has changed; state the fault anew"
    wrong = right.replace(mutation.right, mutation.wrong)
    found = worker.first_seed_that_fails(mutation, wrong)
    assert found is not None, f"no seed of {SEEDS} notices"


def _first_seed_that_fails(mutation: Mutation, text: str) -> int | None:
    plain = sources.load

    def load(file: Path) -> str:
        return text if file.name == mutation.name else plain(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "load", load)
        cases = mutations._cases("flags", mutation.setting)
        for seed in range(1, SEEDS + 1):
            try:
                mutations._simulate(cases, mutation.setting, seed)
            except (mc.CompileError, mc.ConfigError):
                raise  # not a kernel any more
            except (mc.MoecommError, AssertionError):
                return seed
    return None
