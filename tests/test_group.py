"""``Group``: exchange, subgroups, lifetimes, and the ways to join."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import group_functions
import pytest

from moecomm import rendezvous
from moecomm.addresses import own_addresses
from moecomm.errors import ConfigError, PeerTimeout, StateError, TransportError
from moecomm.group import Group
from moecomm.run import outcomes, run
from moecomm.store import TcpStore
from moecomm.store_local import LocalStore
from moecomm.store_server import StoreServer


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
TORCHRUN = ("RANK", "WORLD_SIZE")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = dict(os.environ)
    group_functions.clear_launchers()
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def free_port() -> int:
    """A port with room above it that nobody uses right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return min(int(probe.getsockname()[1]), 65000)


def in_threads(size: int, work: Callable[[Group], Any], store: Any = None) -> list[Any]:
    """``work`` on every rank, each a thread; results, or the error that a rank raised, by rank."""
    store = store or LocalStore()
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(Group(rank, size, store))
        except Exception as error:  # noqa: BLE001  the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def without_errors(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


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


# Joining what a launcher started


@pytest.mark.parametrize(
    ("names", "extra"),
    [
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "PORT"}),
        (TORCHRUN, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}),
        (
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "prterun-PORT@1"},
        ),
        (("PMI_RANK", "PMI_SIZE"), {"MPI_LOCALNRANKS": "3"}),
        (("SLURM_PROCID", "SLURM_NTASKS"), {"SLURM_NNODES": "1", "SLURM_JOB_ID": "PORT"}),
        (
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
            {"SLURM_NNODES": "2", "SLURM_JOB_ID": "PORT", "SLURM_STEP_NODELIST": "localhost,b"},
        ),
        (TORCHRUN, {"MOECOMM_STORE": "127.0.0.1:PORT"}),
    ],
    ids=["torchrun", "own script", "Open MPI", "MPICH", "Slurm", "Slurm, 2 nodes", "MOECOMM_STORE"],
)
def test_from_env(names: tuple[str, str], extra: dict[str, str]) -> None:
    port = str(free_port())
    extra = {name: value.replace("PORT", port) for name, value in extra.items()}
    results = run(group_functions.join_by_environment, 3, names, extra)
    assert results == [(r, 3, 3) for r in range(3)]


@needs_ipv6
@pytest.mark.parametrize("how", ["MASTER_ADDR", "MOECOMM_STORE"])
def test_from_env_over_ipv6(how: str) -> None:  # F12
    port = str(free_port())
    extra = {"MASTER_ADDR": "::1", "MASTER_PORT": port}
    if how == "MOECOMM_STORE":
        extra = {"MOECOMM_STORE": f"[::1]:{port}"}
    results = run(group_functions.join_by_environment, 2, TORCHRUN, extra)
    assert results == [(0, 2, 2), (1, 2, 2)]


def test_taken_ports_are_passed_over() -> None:
    """The launcher holds MASTER_PORT; a neighbour's store and a stranger hold the next two."""
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        StoreServer("127.0.0.1", port + 1, job="a neighbour"),
        socket.create_server(("127.0.0.1", port + 2)),
    ):
        extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        results = run(group_functions.join_by_environment, 2, TORCHRUN, extra)
    assert results == [(0, 2, 2), (1, 2, 2)]


def test_several_groups_from_one_environment() -> None:  # C13, D14
    extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run(group_functions.join_several_times, 3, extra)


def test_a_group_of_another_size_is_another_group() -> None:  # D13
    extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run(group_functions.join_with_new_sizes, 2, extra) == [[2, 1, 2]] * 2


def test_the_serving_rank_may_leave_first() -> None:
    extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run(group_functions.leave_at_once_after_the_last_exchange, 3, extra) == [True] * 3


def test_a_missing_rank_0_is_named(clean_environment: pytest.MonkeyPatch) -> None:
    extra = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group_functions.launched_by(TORCHRUN, 1, 2, extra)
    with pytest.raises(PeerTimeout, match="rank 1 timed out waiting for rank 0 in bootstrap"):
        Group.from_env(timeout_s=0.3)


def test_one_rank_needs_no_network(clean_environment: pytest.MonkeyPatch) -> None:
    group_functions.launched_by(TORCHRUN, 0, 1, {})
    with Group.from_env() as group:
        assert group.all_gather(b"x") == [b"x"]
        assert "moecomm-store" not in [t.name for t in threading.enumerate()]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "no launcher's variables are set"),
        ({"RANK": "0"}, "no launcher's variables are set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: must be from 0 to WORLD_SIZE=2 - 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MOECOMM_STORE is not set: torchrun does not say"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, "several machines"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MOECOMM_STORE": "nohost"},
            r"MOECOMM_STORE='nohost': must be host:port",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "p"},
            "MASTER_PORT='p': must be a number",
        ),
    ],
)
def test_a_bad_environment_is_explained(
    variables: dict[str, str], text: str, clean_environment: pytest.MonkeyPatch
) -> None:
    os.environ.update(variables)
    with pytest.raises(ConfigError, match=text):
        Group.from_env(timeout_s=0.1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[003-005,9],x1", "gpu003"),
        ("gpu[9],x1", "gpu9"),
        ("rack[1-2]n[04,7]-ib", "rack1n04-ib"),
    ],
)
def test_the_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert rendezvous.first_node(nodes) == first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fe80::1%eth0]:29500", ("fe80::1%eth0", 29500)),
        ("host", None),
        ("host:0", None),
        ("host:65536", None),
        ("fe80::1:29500", None),
        (":29500", None),
    ],
)
def test_host_and_port(text: str, expected: tuple[str, int] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="host:port"):
            rendezvous.split_host_port(text)
    else:
        assert rendezvous.split_host_port(text) == expected


def test_candidate_ports_are_valid_ports() -> None:
    for base in (1, 29500, 65000, 65472, 65473, 65535, 65536):
        ports = rendezvous._ports(base)
        assert len(ports) == 64
        assert ports[0] >= 1
        assert ports[-1] <= 65535
        assert base - 1 not in ports, "the launcher's own port"


def test_from_mpi() -> None:
    assert run(group_functions.join_by_mpi, 3) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(ConfigError, match="must be a communicator with Get_rank"):
        Group.from_mpi(object())


def test_ranks_on_different_machines_use_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abcdef")
    monkeypatch.setattr(rendezvous, "machine", lambda: next(names))
    monkeypatch.setattr(rendezvous, "own_addresses", lambda: ["no such host.invalid", "127.0.0.1"])
    store = LocalStore()

    def work(outer: Group) -> tuple[int, Any]:
        class Communicator:
            Get_rank = staticmethod(lambda: outer.rank)
            Get_size = staticmethod(lambda: outer.size)
            allgather = staticmethod(outer.all_gather)

        with Group.from_mpi(Communicator()) as group:
            group_functions.ring(group)
            return group.rank, group.store.address[0]  # type: ignore[attr-defined]

    assert without_errors(in_threads(3, work, store)) == [(r, "127.0.0.1") for r in range(3)]


def test_own_addresses_answer() -> None:
    with StoreServer(None, job="here") as server:
        addresses = [(host, server.port) for host in own_addresses()]
        TcpStore.connect(addresses, job="here", timeout_s=10).close()


def test_a_rank_0_that_cannot_serve_is_an_error_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no sockets today")

    monkeypatch.setattr(rendezvous, "StoreServer", refuse)

    def work(outer: Group) -> None:
        rendezvous._join(outer.rank, outer.size, outer.all_gather, 5)

    for error in in_threads(3, work):
        assert isinstance(error, TransportError)
        assert "rank 0 cannot serve a store: no sockets today" in str(error)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", None), ("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3")],
)
def test_an_nccl_group_works_on_torchs_current_gpu(
    backend: str, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with Group.from_torch() as group:
        assert group.device == device


def test_from_torch(tmp_path: Path) -> None:  # D10, D16
    pytest.importorskip("torch.distributed", reason="torch is not installed")
    found = run(group_functions.join_by_torch, 3, str(tmp_path), timeout_s=120)
    for rank, what in enumerate(found):
        assert "init_process_group first" in what["not initialised"]
        assert what["world"] == (rank, 3)
        for name, members in (("swapped", (0, 1)), ("outer pair", (0, 2))):
            assert (name in what) == (rank in members)
            if name in what:
                ours, theirs, size = what[name]
                assert (ours, size) == (theirs, 2)


TORCHRUN_SCRIPT = """
import os
from moecomm.group import Group

with Group.from_env() as group:
    values = group.all_gather(os.environ["LOCAL_RANK"].encode())
    assert values == [b"0", b"1"], values
    os.write(1, b"rank %d of %d\\n" % (group.rank, group.size))
"""


def test_from_env_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed", reason="torch is not installed")
    path = tmp_path / "under_torchrun.py"
    path.write_text(TORCHRUN_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_endless_time_outs_are_allowed() -> None:
    results = in_threads(2, lambda g: g.all_gather(b"", float("inf")))
    assert without_errors(results) == [[b"", b""]] * 2


def test_setting_up_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="moecomm"):
        without_errors(in_threads(2, lambda g: g.barrier(10)))
    assert caplog.text == ""
