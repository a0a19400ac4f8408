"""InfiniBand ports, which find each other by local ids: connected without an RDMA device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from fake_ports import V1, make_port
from fake_verbs import FakeVerbs, installed
from verbs_ends import SIZING, TIMEOUT_S

from moecomm.store_local import LocalStore
from moecomm.transport.verbs import BOOTSTRAPS
from moecomm.transport.verbs.bootstrap import Address, StoreBootstrap
from moecomm.transport.verbs.devices import Port, choose_ports
from moecomm.transport.verbs.nic import VerbsNic
from moecomm.transport.verbs.queues import Parameters, route

SUBNET = "fe80:0000:0000:0000:0002:c903:0000:000"  # and the number of a port
OTHER_SUBNET = "fec0:0000:0000:0001:0002:c903:0000:0009"
PARAMETERS = Parameters(service_level=3, traffic_class=7, hop_limit=9)


@pytest.fixture
def ports(tmp_path: Path) -> list[Port]:
    for number in (1, 2):
        # In sysfs the type of an InfiniBand port's address reads as that of RoCE version 1.
        make_port(tmp_path, f"mlx5_{number}", {0: (f"{SUBNET}{number}", V1)}, link="InfiniBand")
    return choose_ports(sysfs=tmp_path)


@pytest.fixture
def library(ports: list[Port]) -> Iterator[FakeVerbs]:
    with installed(ports) as fake:
        yield fake


@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_ports_of_one_subnet_connect_by_local_id(
    ports: list[Port], library: FakeVerbs, bootstrap: str
) -> None:
    over_store = partial(StoreBootstrap, LocalStore(), "test") if bootstrap == "store" else None
    nics = [VerbsNic(p, SIZING, parameters=PARAMETERS, bootstrap=over_store) for p in ports]
    told = [nic.address() for nic in nics]
    assert [Address.from_bytes(data).roce for data in told] == [0, 0]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda nic: nic.connect(told, TIMEOUT_S), nics))
    routes = library.routes()
    assert len(routes) == 2 * 2 * 2  # ports, peers (itself is one), for writes and for messages
    for port in ports:
        lids = sorted(way.dlid for at, way in routes if at == port)
        assert lids == sorted([*library.lids.values()] * 2)
    for _, way in routes:
        assert (way.is_global, way.sl, way.port_num) == (0, 3, 1)
        assert bytes(way.grh.dgid) == bytes(16)
    for nic in nics:
        nic.close()


@pytest.mark.usefixtures("library")
def test_another_subnet_needs_the_global_header_too(ports: list[Port]) -> None:
    nic = VerbsNic(ports[0], SIZING)
    gid = bytes.fromhex(OTHER_SUBNET.replace(":", ""))
    way = route(nic._device, 0x1234, gid, PARAMETERS)
    assert (way.is_global, way.dlid, bytes(way.grh.dgid)) == (1, 0x1234, gid)
    header = way.grh.sgid_index, way.grh.hop_limit, way.grh.traffic_class
    assert header == (0, 9, 7)
    nic.close()
