"""``Group``: the ways to join what a launcher, MPI or torch has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import group_functions
import pytest
from group_threads import free_port, in_threads, without_errors

from moecomm import rendezvous
from moecomm.addresses import own_addresses
from moecomm.errors import ConfigError, PeerTimeout, TransportError
from moecomm.group import Group
from moecomm.run import run
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
