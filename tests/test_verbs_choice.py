"""Whether ``verbs`` joins nodes, decided by the RDMA ports that the ranks have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import fake_transport
import pytest
from exchange import make_case, run_case
from fake_ports import IPV4, V2, make_port
from threads import run_threads

import moecomm as mc
from moecomm.transport import efa, verbs
from moecomm.transport.verbs.devices import Port, choose_ports

CFG = mc.MoeConfig(num_experts=6, top_k=3, hidden=24, max_tokens=6, wire="flags")


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, own: threading.local | None = None) -> None:
    """The ports of this process are those in ``folder``, or of a rank those in ``own.folder``;
    libibverbs is there, an EFA device not. Ranks are nodes."""

    def ports(names: Sequence[str] | None = None) -> list[Port]:
        return choose_ports(names, getattr(own, "folder", folder))

    monkeypatch.setattr(verbs, "choose_ports", ports)
    monkeypatch.setattr(verbs, "load_library", lambda: None)
    monkeypatch.setattr(efa, "has_device", lambda: False)
    monkeypatch.setenv("MOECOMM_NODE_SIZE", "1")


@pytest.mark.parametrize(
    ("state", "said"),
    [(None, "(no RDMA device)"), ("1: DOWN", "(irdma0 port 1 DOWN)")],
    ids=["no-device", "port-down"],
)
def test_f05_an_exchange_without_a_port_is_everybodys_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str | None, said: str
) -> None:
    if state is not None:
        make_port(tmp_path, "irdma0", {0: (IPV4, V2)}, state=state)
    play(monkeypatch, tmp_path)

    def work(group: mc.Group) -> str:
        with pytest.raises(mc.TransportUnavailable) as caught:
            mc.MoeComm(CFG, group, "verbs")
        return str(caught.value)

    assert run_threads(work, 2) == [f"transport='verbs': no active port {said}"] * 2


def test_f05_one_rank_without_a_port_is_named_by_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_port(tmp_path, "irdma0", {0: (IPV4, V2)})
    own = threading.local()
    play(monkeypatch, tmp_path, own)

    def work(group: mc.Group) -> mc.MoecommError:
        own.folder = tmp_path / "nothing" if group.rank else tmp_path
        with pytest.raises(mc.MoecommError) as caught:
            mc.MoeComm(CFG, group, "verbs")
        return caught.value

    has, lacks = run_threads(work, 2)
    assert str(lacks) == "transport='verbs': no active port (no RDMA device)"
    assert str(has) == f"rank 1 failed in network: TransportUnavailable: {lacks}"


def test_f06_a_nic_that_no_gpu_can_ring_is_driven_by_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever RDMA device all ranks have, ``auto`` takes it, with a mover; the exchange runs."""
    make_port(tmp_path, "irdma0", {0: (IPV4, V2)})
    play(monkeypatch, tmp_path)
    monkeypatch.setattr(verbs, "open_engine", fake_transport.open_engine)
    case = make_case(CFG, 2, 0)

    def work(group: mc.Group) -> int:
        with mc.MoeComm(CFG, group) as comm:
            run_case(comm, case)
            return comm._runtime._mover.counters()["head"][0]

    with fake_transport.network(2, 1), caplog.at_level("INFO"):
        assert run_threads(work, 2) == [1, 1]
    assert "transport 'verbs': 2 ranks on 2 nodes, which all have" in caplog.text
