"""What ranks do in the tests of ``Group``, without the tests' imports."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from moecomm.errors import PeerTimeout, StateError
from moecomm.group import Group


def launched_by(names: tuple[str, str], rank: int, size: int, extra: dict[str, str]) -> None:
    """Make this process look as if a launcher had started it."""
    clear_launchers()
    os.environ.update({names[0]: str(rank), names[1]: str(size), **extra})


def clear_launchers() -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MOECOMM_STORE"):
        os.environ.pop(name, None)


def ring(group: Group) -> list[bytes]:
    """A few exchanges that fail unless rank, size and store are those of the group."""
    for n in range(3):
        assert group.all_gather(b"%d.%d" % (group.rank, n), 20) == [
            b"%d.%d" % (rank, n) for rank in range(group.size)
        ]
    return group.all_gather(b"%d" % os.getpid(), 20)


def join_by_environment(
    outer: Group, names: tuple[str, str], extra: dict[str, str]
) -> tuple[int, int, int]:
    """``Group.from_env``, used and closed; rank, size and the number of distinct processes."""
    launched_by(names, outer.rank, outer.size, extra)
    time.sleep(0.1 * (outer.rank == 0))  # the others look for a server that is not there yet
    with Group.from_env(timeout_s=20) as group:
        pids = ring(group)
        return group.rank, group.size, len(set(pids))


def join_several_times(outer: Group, extra: dict[str, str]) -> None:
    """Four groups open at once, made and used with skew; then one more after closing them."""
    launched_by(("RANK", "WORLD_SIZE"), outer.rank, outer.size, extra)
    wait = random.Random(outer.rank)
    groups = []
    for _ in range(4):
        time.sleep(wait.uniform(0, 0.05))
        groups.append(Group.from_env(timeout_s=20))
    for step in range(10):
        for n, group in enumerate(groups):
            time.sleep(wait.uniform(0, 0.005))
            value = b"%d %d " % (step, n)
            got = group.all_gather(value + b"%d" % group.rank, 20)
            assert got == [value + b"%d" % r for r in range(group.size)]
    for group in groups:
        group.close()
    with Group.from_env(timeout_s=20) as again:
        ring(again)


def join_with_new_sizes(outer: Group, extra: dict[str, str]) -> list[int]:
    """Two ranks, then each alone, then two again."""
    sizes = []
    for size in (2, 1, 2):
        launched_by(("RANK", "WORLD_SIZE"), outer.rank if size == 2 else 0, size, extra)
        with Group.from_env(timeout_s=20) as group:
            ring(group)
            sizes.append(group.size)
    return sizes


def leave_at_once_after_the_last_exchange(outer: Group, extra: dict[str, str]) -> bool:
    """Rank 0 serves and leaves first, again and again; the others still get their results."""
    launched_by(("RANK", "WORLD_SIZE"), outer.rank, outer.size, extra)
    for n in range(10):
        with Group.from_env(timeout_s=20) as group:
            if group.rank:
                time.sleep(0.002 * n)
            assert group.all_gather(b"x" * 100_000, 20) == [b"x" * 100_000] * group.size
    return True


def join_by_mpi(outer: Group) -> tuple[int, int]:
    class Communicator:
        """What is used of mpi4py's."""

        def Get_rank(self) -> int:  # noqa: N802
            return outer.rank

        def Get_size(self) -> int:  # noqa: N802
            return outer.size

        def allgather(self, value: bytes) -> list[bytes]:
            return outer.all_gather(value)

    with Group.from_mpi(Communicator()) as group:
        ring(group)
        return group.rank, group.size


def join_by_torch(outer: Group, folder: str) -> dict[str, Any]:
    """Everything about torch in one start: importing it is most of the time."""
    import torch.distributed as dist

    found: dict[str, Any] = {}

    def begin(n: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{n}", rank=outer.rank, world_size=outer.size
        )

    try:
        Group.from_torch()
    except StateError as error:
        found["not initialised"] = str(error)
    begin(0)
    world = Group.from_torch()  # closed after destroy_process_group
    found["world"] = (world.rank, world.size)
    swapped = dist.new_group([1, 0])
    outer_pair = dist.new_group([0, 2])
    if outer.rank < 2:
        with Group.from_torch(swapped) as group:
            ring(group)
            found["swapped"] = (group.rank, dist.get_rank(swapped), group.size)
    if outer.rank != 1:
        with Group.from_torch(outer_pair) as group:
            ring(group)
            found["outer pair"] = (group.rank, dist.get_rank(outer_pair), group.size)
    dist.destroy_process_group()
    ring(world)  # nothing of torch is needed any more
    world.close()
    begin(1)
    with Group.from_torch() as group:  # closed before destroy_process_group
        ring(group)
    dist.destroy_process_group()
    begin(2)
    group = Group.from_torch()  # closed without destroy_process_group
    ring(group)
    group.close()
    return found


def subgroup_then_all(group: Group) -> list[int]:
    pair = group.subgroup([0, 1])
    if pair is not None:
        ring(pair)
    everyone = group.subgroup(range(group.size))
    assert everyone is not None
    ring(everyone)
    ring(group)
    return [-1 if pair is None else pair.rank, everyone.rank]


def touch_in_forked_child(group: Group) -> int:
    """F13: the child lives, is told, and disturbs nobody."""
    group.barrier()
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], object]] = [
            group.barrier,
            lambda: group.all_gather(b""),
            lambda: group.subgroup([0]),
            lambda: group.instance_key("x"),
        ]
        failures = 0
        for call in calls:
            try:
                call()
                failures += 1
            except StateError as error:
                failures += "forked" not in str(error)
        group.close()
        os._exit(failures)
    _, status = os.waitpid(child, 0)
    ring(group)
    return os.waitstatus_to_exitcode(status)


def load_data_with_workers(group: Group) -> int:
    """A forked worker pool of another library, while the group is open."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        total = sum(pool.map(abs, range(10)))
        ring(group)
    ring(group)
    return total


def wait_for_the_dead(group: Group) -> tuple[str, int, int, int]:
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    try:
        group.barrier(0.5, "combine_recv")
    except PeerTimeout as error:
        return error.phase, error.peer, error.expected, error.seen
    raise AssertionError("no PeerTimeout")
