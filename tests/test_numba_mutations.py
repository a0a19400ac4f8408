"""Would the tests notice a mistake in the kernels in Python? One at a time, each must be found.

As ``test_mutations.py`` for the CUDA C++ kernels, whose settings these are; the right kernels pass
them in ``test_numba_kernels.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mutation_steps import cases, simulate_setting
from mutations import SEEDS, Mutation, Search, first_failure, searching

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


@pytest.fixture(scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[Search]:
    yield from searching(request, _look, {name: (fault,) for name, fault in MUTATIONS.items()})


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_found(name: str, search: Search) -> None:
    assert search[name] is not None, f"no seed of {SEEDS} notices"


def _look(mutation: Mutation) -> str | None:
    plain = sources.load
    wrong = mutation.apply(plain(sources.PACKAGE / mutation.name))

    def load(file: Path) -> str:
        return wrong if file.name == mutation.name else plain(file)

    steps = cases("flags", mutation.setting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_KERNELS", "numba")
        patch.setattr(sources, "load", load)
        return first_failure(lambda seed: simulate_setting(steps, mutation.setting, seed))
