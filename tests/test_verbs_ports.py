"""Which ports and which of their addresses are used, from a sysfs that tests play."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_ports import EMPTY, IPV4, IPV6, LINK_LOCAL, LOOPBACK, V1, V2, make_port

from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.transport.verbs import gids
from moecomm.transport.verbs.devices import choose_ports


def chosen(tmp_path: Path, *entries: tuple[str, str], wanted: int | None = None) -> int:
    folder = make_port(tmp_path, "mlx5_0", dict(enumerate(entries)))
    return gids.choose(gids.table(folder), "mlx5_0 port 1", roce=True, wanted=wanted).index


# Which address


@pytest.mark.parametrize(
    ("entries", "best"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)], 3),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV6, V2), (IPV4, V2)], 3),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV6, V1), (IPV6, V2)], 3),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(LINK_LOCAL, V1), (IPV4, V1)], 1),
        ([(LINK_LOCAL, V2), (LOOPBACK, V2)], 1),
        ([(LOOPBACK, V2), (EMPTY, ""), (IPV4, V2)], 2),
        ([(IPV4, V2), (IPV4, V2)], 0),
    ],
    ids=["mlx5", "ipv4-before-6", "ipv6", "v2-before-1", "v1-only", "lo", "hole", "lowest"],
)
def test_the_address_of_a_roce_port(
    tmp_path: Path, entries: list[tuple[str, str]], best: int
) -> None:
    assert chosen(tmp_path, *entries) == best


def test_the_choice_can_be_overridden(tmp_path: Path) -> None:
    entries = [(LINK_LOCAL, V1), (IPV6, V2), (IPV4, V2)]
    assert chosen(tmp_path, *entries, wanted=1) == 1
    with pytest.raises(ConfigError, match=r"gid_index=7: mlx5_0 port 1 has no such GID") as caught:
        gids.choose(
            gids.table(tmp_path / "mlx5_0" / "ports" / "1"), "mlx5_0 port 1", roce=True, wanted=7
        )
    assert "GID 2 (RoCE v2, 10.0.0.1)" in str(caught.value)


def test_infiniband_has_one_address(tmp_path: Path) -> None:
    folder = make_port(tmp_path, "mlx5_0", {0: (LINK_LOCAL, V1), 1: (IPV6, V1)}, link="InfiniBand")
    assert gids.choose(gids.table(folder), "mlx5_0 port 1", roce=False).index == 0


def test_a_port_without_an_address(tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailable, match="mlx5_0 port 1 has no GID.*IP address"):
        chosen(tmp_path)


def test_a_long_table_with_a_hole(tmp_path: Path) -> None:
    folder = make_port(tmp_path, "mlx5_0", {0: (LINK_LOCAL, V2), 40: (IPV4, V2)})
    assert [gid.index for gid in gids.table(folder)] == [0, 40]


# Which ports


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    entries = {0: (IPV4, V2)}
    make_port(tmp_path, "mlx5_0", entries, state="1: DOWN")
    make_port(tmp_path, "mlx5_1", entries)
    make_port(tmp_path, "mlx5_2", entries, link="InfiniBand")
    make_port(tmp_path, "mlx5_3", entries)
    make_port(tmp_path, "mlx5_3", entries, number=2)
    return tmp_path


def names(sysfs: Path, *wanted: str) -> list[str]:
    ports = choose_ports(wanted or None, sysfs)
    return [f"{port.device}:{port.number}" for port in ports]


def test_the_active_ports_of_one_kind(sysfs: Path) -> None:
    assert names(sysfs) == ["mlx5_1:1", "mlx5_3:1", "mlx5_3:2"]


def test_named_ports(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(sysfs, "mlx5_3:2", "mlx5_1") == ["mlx5_3:2", "mlx5_1:1"]
    monkeypatch.setenv("MOECOMM_RDMA_PORTS", "mlx5_2, mlx5_1")
    assert names(sysfs) == ["mlx5_2:1", "mlx5_1:1"]
    assert names(sysfs, "mlx5_3") == ["mlx5_3:1"]  # an argument comes before the variable


def test_ports_that_cannot_be(sysfs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rdma_ports='mlx4_0'.*mlx5_3:2"):
        names(sysfs, "mlx4_0")
    with pytest.raises(ConfigError, match=r"rdma_ports='mlx5_1:2'"):
        names(sysfs, "mlx5_1:2")
    for name in ("mlx5_0", "mlx5_0:1"):
        with pytest.raises(TransportUnavailable, match="mlx5_0 port 1 is DOWN"):
            names(sysfs, name)
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        names(tmp_path / "nothing")
    make_port(tmp_path / "down", "mlx5_0", {}, state="1: DOWN")
    with pytest.raises(TransportUnavailable, match=r"no active port \(mlx5_0 port 1 DOWN\)"):
        names(tmp_path / "down")
