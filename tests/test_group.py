"""``Group``: exchange, subgroups, lifetimes."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import group_functions
import pytest
from group_threads import free_port, in_threads, without_errors

from moecomm.errors import ConfigError, PeerTimeout, StateError, TransportError
from moecomm.group import Group
from moecomm.run import outcomes, run
from moecomm.store import TcpStore
from moecomm.store_local import LocalStore
from moecomm.store_server import StoreServer

# Exchange


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_gather_gives_everybodys_value_by_rank(size: int) -> None:
    def work(group: Group) -> list[list[bytes]]:
        wait = random.Random(group.rank)
        rounds = []
        for n in range(20):
            time.sleep(wait.choice([0, 0, 0.003]))
            value = bytes([group.rank, n]) * (group.rank * n)
            rounds.append(group.all_gather(value, 20))
        return rounds

    expected = [[bytes([r, n]) * (r * n) for r in range(size)] for n in range(20)]
    assert without_errors(in_threads(size, work)) == [expected] * size


def test_large_groups_exchange() -> None:  # A21: 129 ranks
    def work(group: Group) -> bool:
        return group.all_gather(b"%d" % group.rank, 30) == [b"%d" % r for r in range(129)]

    assert without_errors(in_threads(129, work)) == [True] * 129


def test_barrier_waits_for_all() -> None:
    came: list[int] = []

    def work(group: Group) -> int:
        time.sleep(0.05 * group.rank)
        came.append(group.rank)
        group.barrier(20)
        return len(came)

    assert without_errors(in_threads(4, work)) == [4] * 4


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_every_waiting_rank_names_the_missing_one(missing: int) -> None:
    def work(group: Group) -> None:
        if group.rank != missing:
            group.all_gather(b"", 0.3, "dispatch_recv")

    start = time.monotonic()
    results = in_threads(4, work)
    assert time.monotonic() - start < 3
    for rank in set(range(4)) - {missing}:
        error = results[rank]
        assert isinstance(error, PeerTimeout), error
        assert (error.phase, error.peer, error.rank) == ("dispatch_recv", missing, rank)
        assert (error.expected, error.seen) == (4, 3)
        assert str(error) == (
            f"rank {rank} timed out waiting for rank {missing} in dispatch_recv: expected 4, saw 3"
        )


def test_the_lowest_of_several_missing_ranks_is_named() -> None:
    def work(group: Group) -> None:
        if group.rank not in (1, 3):
            group.barrier(0.3)

    results = in_threads(5, work)
    assert [(results[r].peer, results[r].seen) for r in (0, 2, 4)] == [(1, 3)] * 3
    assert results[0].phase == "barrier"


def test_a_rank_that_comes_late_is_told_and_the_next_call_works() -> None:
    def work(group: Group) -> list[bytes]:
        if group.rank == 1:
            time.sleep(0.5)
            with pytest.raises(TransportError, match="rank 1 came to first after rank 0 had"):
                group.all_gather(b"late", 5, "first")
        else:
            with pytest.raises(PeerTimeout):
                group.all_gather(b"", 0.2, "first")
        return group.all_gather(b"%d" % group.rank, 10)

    assert without_errors(in_threads(3, work)) == [[b"0", b"1", b"2"]] * 3


def test_a_dead_rank_is_named_by_the_others() -> None:
    got = outcomes(group_functions.wait_for_the_dead, 3, timeout_s=20)
    assert [o.exit_code for o in got] == [0, -9, 0]
    assert [o.value for o in got if o.rank != 1] == [("combine_recv", 1, 3, 2)] * 2


def test_the_store_does_not_grow() -> None:
    sizes = []

    def work(group: Group) -> None:
        for n in range(50):
            group.all_gather(b"x" * 100, 20)
            if group.rank == 0 and n in (5, 45):
                sizes.append(len(store._values))

    store = LocalStore()
    without_errors(in_threads(3, work, store))
    assert abs(sizes[1] - sizes[0]) <= 4  # what is under way at that moment


def test_groups_work_over_tcp_from_threads_at_once() -> None:  # C06
    with StoreServer("127.0.0.1", job="x") as server:
        stores = [TcpStore("127.0.0.1", server.port, job="x") for _ in range(2)]

        def rounds(group: Group) -> int:
            for n in range(300):
                expected = [b"%d %d" % (r, n) for r in range(2)]
                assert group.all_gather(b"%d %d" % (group.rank, n), 20) == expected
            return 300

        outcome: list[Any] = []

        def use(rank: int, name: str) -> None:
            outcome.append(rounds(Group(rank, 2, stores[rank], name=name)))

        threads = [threading.Thread(target=use, args=(r, n)) for r in range(2) for n in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert outcome == [300] * 4
        for store in stores:
            store.close()


# Several groups


def test_groups_on_one_store_do_not_meet() -> None:
    def work(group: Group) -> list[list[bytes]]:
        second = Group(group.rank, group.size, group.store)
        third = Group(group.rank, group.size, group.store, name="3/..%2")
        groups = [group, second, third, group.child(), second.child()]
        # Rank 1 works through them with other numbers of calls before: only the keys tell apart.
        return [
            g.all_gather(b"%d %d %d" % (group.rank, n, k), 20)
            for n in range(5)
            for k, g in enumerate(groups)
        ]

    expected = [[b"%d %d %d" % (r, n, k) for r in range(3)] for n in range(5) for k in range(5)]
    assert without_errors(in_threads(3, work)) == [expected] * 3


def test_a_second_life_of_all_ranks_does_not_meet_the_first() -> None:
    """The store outlives the ranks: what the first life left is not taken for the second's."""
    store = LocalStore()

    def first(group: Group) -> None:
        if group.rank == 0:
            store.set(f"{group._prefix}/gather/0/1", b"left over")
        group.rank and group.barrier(0.1)

    in_threads(2, first, store)
    results = in_threads(2, lambda g: g.all_gather(b"%d" % g.rank, 10), store)
    assert without_errors(results) == [[b"0", b"1"]] * 2


def test_subgroups_number_their_members_in_the_order_given() -> None:  # D16
    def work(group: Group) -> list[Any]:
        got: list[Any] = []
        for ranks in ([1, 0], [0, 2], [3, 1, 2], [2], range(4)):
            part = group.subgroup(ranks)
            if part is None:
                got.append(None)
                continue
            values = part.all_gather(b"%d" % group.rank, 20)
            assert values == [b"%d" % r for r in ranks]
            got.append((part.rank, part.size))
        return got

    results = without_errors(in_threads(4, work))
    assert results[0] == [(1, 2), (0, 2), None, None, (0, 4)]
    assert results[2] == [None, (1, 2), (2, 3), (0, 1), (2, 4)]


def test_a_subgroup_does_not_disturb_the_next_group() -> None:  # D15
    expected = [[0, 0], [1, 1], [-1, 2]]
    assert run(group_functions.subgroup_then_all, 3) == expected


def test_nobody_waits_for_ranks_outside() -> None:
    """Rank 2 never calls anything, and its absence is noticed by nobody."""

    def work(group: Group) -> Any:
        if group.rank == 2:
            return None
        pairs = [group.subgroup([0, 1]) for _ in range(3)]
        for pair in reversed(pairs):
            assert pair is not None
            assert pair.all_gather(b"%d" % group.rank, 5) == [b"0", b"1"]
        nested = pairs[0].subgroup([1, 0]) if pairs[0] else None
        assert nested is not None
        return nested.all_gather(b"%d" % group.rank, 5)

    assert without_errors(in_threads(3, work)) == [[b"1", b"0"], [b"1", b"0"], None]


def test_overlapping_subgroups_of_one_size_stay_apart() -> None:
    def work(group: Group) -> None:
        for n in range(20):
            for pair in ([0, 1], [1, 2], [2, 0], [1, 0]):
                part = group.subgroup(pair)
                if part is not None:
                    value = b"%d %d" % (group.rank, n)
                    assert part.all_gather(value, 20) == [b"%d %d" % (r, n) for r in pair]

    without_errors(in_threads(3, work))


def test_subgroups_inherit_what_moecomm_reads() -> None:
    simulation = object()
    group = Group(0, 2, LocalStore(), simulation=simulation, device="cuda", transport="loopback")
    part = group.subgroup([0])
    assert part is not None
    assert (part.simulation, part.device, part.transport) == (simulation, "cuda", "loopback")
    plain = Group(0, 1, LocalStore())
    assert (plain.simulation, plain.device, plain.transport) == (None, None, "auto")


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], [2], [0, 5]])
def test_bad_subgroups_are_refused(ranks: list[int]) -> None:
    group = Group(0, 2, LocalStore())
    with pytest.raises(ConfigError, match="ranks="):
        group.subgroup(ranks)


def test_instance_keys_are_never_given_twice() -> None:
    group = Group(0, 1, LocalStore())
    labels = ["a", "a", "a.1", "a/b", "a%2Fb", "gather", "gather/0"]
    keys = [group.instance_key(label) for label in labels * 3]
    assert len(set(keys)) == len(keys)
    peers = [Group(r, 2, LocalStore()) for r in range(2)]
    assert peers[0].instance_key("x") == peers[1].instance_key("x")
    assert peers[0].instance_key("x") == peers[1].instance_key("x")


# Arguments, lifetime


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [
        (0, 0, "size=0"),
        (0, 1025, "size=1025"),
        (0, 2.0, "size=2.0"),
        (2, 2, "rank=2: must be an integer from 0 to 1"),
        (-1, 2, "rank=-1"),
        (True, 2, "rank=True"),
    ],
)
def test_arguments_are_checked(rank: Any, size: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Group(rank, size, LocalStore())


def test_a_closed_group_says_so() -> None:
    group = Group(0, 2, LocalStore())
    child = group.child()
    group.close()
    group.close()
    calls: list[Callable[[], object]] = [
        group.barrier,
        lambda: group.all_gather(b""),
        lambda: group.subgroup([0]),
        group.child,
        lambda: group.instance_key("x"),
    ]
    for call in calls:
        with pytest.raises(StateError, match="the Group is closed"):
            call()
    assert child.subgroup([1]) is None  # its own life goes on


def test_the_last_group_closes_the_store() -> None:
    closed: list[int] = []
    group = Group(0, 2, LocalStore(), on_close=lambda: closed.append(1))
    child, part = group.child(), group.subgroup([0])
    assert part is not None
    for one in (group, part):
        one.close()
        one.close()
    assert closed == []
    with child:
        pass
    assert closed == [1]


def test_a_group_stays_in_its_process() -> None:
    group = Group(0, 1, LocalStore())
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(StateError, match="belongs to its process"):
            copying(group)
    assert repr(group) == "<Group rank 0 of 1>"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_are_told_and_do_no_harm() -> None:  # F13
    assert run(group_functions.touch_in_forked_child, 2) == [0, 0]
    assert run(group_functions.load_data_with_workers, 2) == [45, 45]


EXITS = """
import sys, time
from group_functions import launched_by
from moecomm.group import Group
how, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
launched_by(("RANK", "WORLD_SIZE"), rank, 2, extra)
group = Group.from_env()
group.barrier()
time.sleep(0 if rank == 1 else 0.5)
if how == "error":
    raise ValueError("on purpose")
sys.exit(int(how))
"""


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("6", 6), ("error", 1)])
def test_leaving_without_close_keeps_the_exit_code(how: str, code: int) -> None:  # D09
    start, port = time.monotonic(), str(free_port())
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, how, str(rank), port],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code]
    assert time.monotonic() - start < 5 + 0.5
    for text in errors:
        assert ("Traceback" in text) == (how == "error"), text
        assert "Exception ignored" not in text


def test_a_group_of_another_size_is_another_group() -> None:  # D13
    extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run(group_functions.join_with_new_sizes, 2, extra) == [[2, 1, 2]] * 2


def test_endless_time_outs_are_allowed() -> None:
    results = in_threads(2, lambda g: g.all_gather(b"", float("inf")))
    assert without_errors(results) == [[b"", b""]] * 2


def test_setting_up_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="moecomm"):
        without_errors(in_threads(2, lambda g: g.barrier(10)))
    assert caplog.text == ""
