"""RoCE ports whose addresses reach each other, or do not: connected without an RDMA device."""

from __future__ import annotations

import errno
import ipaddress
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_ports import LINK_LOCAL, V1, V2, make_port
from fake_verbs import FakeVerbs, installed
from threads import run_threads
from verbs_ends import SIZING

import moecomm as mc
from moecomm import addresses
from moecomm.addresses import meeting_addresses
from moecomm.store import TcpStore
from moecomm.store_local import LocalStore
from moecomm.transport import verbs
from moecomm.transport.verbs.bootstrap import Address, StoreBootstrap
from moecomm.transport.verbs.devices import Port, choose_ports
from moecomm.transport.verbs.gids import Gid
from moecomm.transport.verbs.nic import VerbsNic

NEAR = (ipaddress.ip_address("10.0.0.9"),)  # where the ranks have met
TEN = "0000:0000:0000:0000:0000:ffff:0a00:000"  # 10.0.0., and the number of a host
OTHER = "0000:0000:0000:0000:0000:ffff:c0a8:070"  # 192.168.7.
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:000"
# What two hosts have, each network in another place.
TABLES = {
    "mlx5_1": [(OTHER, V1), (OTHER, V2), (IPV6, V1), (IPV6, V2), (TEN, V1), (TEN, V2)],
    "mlx5_2": [(TEN, V1), (TEN, V2), (OTHER, V1), (OTHER, V2), (IPV6, V1), (IPV6, V2)],
}
BOOTSTRAPS = pytest.mark.parametrize("bootstrap", verbs.BOOTSTRAPS)
Make = Callable[..., list[VerbsNic]]


@pytest.fixture
def ports(tmp_path: Path) -> list[Port]:
    for device, entries in TABLES.items():
        found = [(start + device[-1], kind) for start, kind in entries]
        found = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), *found]
        make_port(tmp_path, device, dict(enumerate(found)))
    return choose_ports(sysfs=tmp_path)


@pytest.fixture
def library(ports: list[Port]) -> Iterator[FakeVerbs]:
    with installed(ports) as fake:
        yield fake


@pytest.fixture
def make(ports: list[Port], library: FakeVerbs) -> Iterator[Make]:
    """Opens both ports; ``wanted``: which entry of each is to be used."""
    nics: list[VerbsNic] = []

    def open_both(bootstrap: str, *wanted: int) -> list[VerbsNic]:
        over_store = partial(StoreBootstrap, LocalStore(), "test")
        for port, index in zip(ports, wanted or (None, None), strict=True):
            how = over_store if bootstrap == "store" else None
            nics.append(VerbsNic(port, SIZING, gid_index=index, near=NEAR, bootstrap=how))
        return nics

    yield open_both
    for nic in nics:
        nic.close()


def connect(nics: list[VerbsNic], timeout_s: float = 20.0) -> list[Exception | None]:
    """What each end raises."""
    told = [nic.address() for nic in nics]
    with ThreadPoolExecutor(len(nics)) as pool:
        return [f.exception() for f in [pool.submit(n.connect, told, timeout_s) for n in nics]]


def used(nic: VerbsNic) -> tuple[int, str]:
    """The version that its peers are told, and the address."""
    told = Address.from_bytes(nic.address())
    return told.roce, str(Gid(-1, told.gid, V2).address)


@BOOTSTRAPS
def test_f07_both_ends_choose_version_2_in_the_subnet_where_ranks_have_met(
    make: Make, bootstrap: str
) -> None:
    nics = make(bootstrap)
    assert list(map(used, nics)) == [(2, "10.0.0.1"), (2, "10.0.0.2")]
    assert connect(nics) == [None, None]


@BOOTSTRAPS
def test_f07_addresses_that_do_not_reach_each_other_are_named_before_a_write(
    make: Make, bootstrap: str
) -> None:
    """Queue pairs connect to anything; a store carries what the ports cannot."""
    first, second = connect(make(bootstrap, 3, 3), 0.5)
    for error in (first, second):
        assert isinstance(error, mc.PeerTimeout)
        assert error.phase == "connect"
    assert (first.peer, second.peer) == (1, 0)
    assert str(first).endswith(
        "; mlx5_1 port 1 is GID 3 (RoCE v2, 192.168.7.1), the peer 10.0.0.2; if packets do not get "
        "from one to the other, set MOECOMM_GID_INDEX: GID 0 (IB/RoCE v1, "
        "fe80::202:c9ff:fe00:1), GID 1 (RoCE v2, fe80::202:c9ff:fe00:1), "
        "GID 2 (IB/RoCE v1, 192.168.7.1), GID 4 (IB/RoCE v1, 2001:db8::1), "
        "GID 5 (RoCE v2, 2001:db8::1), GID 6 (IB/RoCE v1, 10.0.0.1), GID 7 (RoCE v2, 10.0.0.1)"
    )
    assert "mlx5_2 port 1 is GID 3 (RoCE v2, 10.0.0.2), the peer 192.168.7.1" in str(second)


@pytest.mark.parametrize(
    ("wanted", "first", "second"),
    [
        (
            (6, 3),
            "speaks RoCE v2 at 10.0.0.2, this port GID 6 (IB/RoCE v1, 10.0.0.1): versions",
            "speaks RoCE v1 at 10.0.0.1, this port GID 3 (RoCE v2, 10.0.0.2): versions",
        ),
        (
            (5, 3),
            "has the address 10.0.0.2, this port GID 5 (RoCE v2, 2001:db8::1): IPv4 and IPv6",
            "has the address 2001:db8::1, this port GID 3 (RoCE v2, 10.0.0.2): IPv4 and IPv6",
        ),
    ],
    ids=["versions", "families"],
)
def test_f07_kinds_that_do_not_mix_are_refused_at_once_on_both_ends(
    make: Make, wanted: tuple[int, int], first: str, second: str
) -> None:
    errors = connect(make("datagrams", *wanted))
    for number, (error, text) in enumerate(zip(errors, (first, second), strict=True)):
        assert isinstance(error, mc.TransportError)
        assert not isinstance(error, mc.PeerTimeout)
        assert error.peer == 1 - number
        assert text in str(error)
        assert "set MOECOMM_GID_INDEX" in str(error)


@pytest.mark.parametrize("function", ["ibv_modify_qp", "ibv_create_ah"])
def test_f07_an_address_that_the_device_refuses_is_named(
    make: Make, library: FakeVerbs, function: str
) -> None:
    library.refuse[function] = errno.EINVAL
    for number, error in enumerate(connect(make("datagrams", 3, 3)), 1):
        assert isinstance(error, mc.TransportError)
        assert error.code == errno.EINVAL
        text = str(error)
        assert f"mlx5_{number} port 1" in text
        assert "Invalid argument" in text
        assert "GID 3 (RoCE v2, " in text


def test_f07_the_engine_tells_ports_where_the_ranks_have_met(
    ports: list[Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(verbs, "choose_ports", lambda names: ports)
    monkeypatch.setattr(
        "moecomm.transport.engine.engine.TransferEngine",
        lambda group, nics, **options: opened.extend(nics),
    )
    monkeypatch.setattr(addresses, "own_addresses", lambda: ["10.0.0.9", "10.9.9.9"])
    store = TcpStore("localhost", 0, serve=True)
    verbs.open_engine(mc.Group(0, 1, store))
    store.close()
    assert [opener.near for opener in opened] == [NEAR, NEAR]


def test_addresses_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's; where that is this machine, or unknown, the one that others know it by."""
    monkeypatch.setattr(addresses, "own_addresses", lambda: ["10.0.0.9", "node1"])
    assert meeting_addresses("192.0.2.7") == (ipaddress.ip_address("192.0.2.7"),)
    assert meeting_addresses("2001:db8::7") == (ipaddress.ip_address("2001:db8::7"),)
    for host in ("", "127.0.0.1", "::1", "localhost", "no such host.invalid"):
        assert meeting_addresses(host) == NEAR
    monkeypatch.setattr(addresses, "own_addresses", lambda: ["node1"])
    assert meeting_addresses("") == ()


def test_f05_a_rank_without_a_port_is_known_to_the_other(
    ports: list[Port], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other does not wait for it."""
    monkeypatch.setattr(verbs, "choose_ports", lambda names: choose_ports(names, tmp_path))

    def work(group: mc.Group) -> mc.MoecommError:
        with pytest.raises(mc.MoecommError) as caught:
            verbs.open_engine(group, ["mlx5_9"] if group.rank else None)
        return caught.value

    found, missing = run_threads(work, 2)
    assert str(missing) == "rdma_ports='mlx5_9': no such port; there are: mlx5_1:1, mlx5_2:1"
    assert str(found) == f"rank 1 failed in open: ConfigError: {missing}"


def test_f10_a_device_file_without_access_is_named(make: Make, library: FakeVerbs) -> None:
    library.refuse["ibv_open_device"] = errno.EACCES
    with pytest.raises(mc.TransportError, match="mlx5_1: ibv_open_device failed: Perm") as caught:
        make("datagrams")
    assert "does this user have read and write access to /dev/infiniband/uverbs*?" in str(
        caught.value
    )


def test_f13_what_a_port_registers_for_itself_has_pages_of_its_own(
    make: Make, library: FakeVerbs
) -> None:
    """Where libibverbs keeps registered pages from being forked, a child has them no more."""
    make("datagrams")
    assert len(library.registered) == 2 * 3  # datagrams, messages, words of peers
    pages = [
        range(address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE))
        for address, nbytes in library.registered
    ]
    assert all(address % mmap.PAGESIZE == 0 for address, _ in library.registered)
    assert len({page for part in pages for page in part}) == sum(map(len, pages))
