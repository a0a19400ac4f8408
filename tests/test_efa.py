"""The libfabric layer: its binary interface, what it refuses, and peers that are gone."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from emulated_writes import EMULATED, let_writes_be_emulated
from engines import options
from fork_checks import fork_after_registering
from transport_conformance import raised, registered

import moecomm as mc
from moecomm.errors import ConfigError, TransportError, TransportUnavailable
from moecomm.group import Group
from moecomm.run import outcomes
from moecomm.store_local import LocalStore
from moecomm.transport import open_memory
from moecomm.transport.base import Region
from moecomm.transport.efa import abi, fabrics, open_engine, openers
from moecomm.transport.efa.fabrics import FABRICS, Option
from moecomm.transport.efa.nic import FabricNic
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine.provider import Registration, Sizing

SIZING = Sizing(num_peers=1, tx_depth=64, rx_depth=64, message_bytes=64, num_messages=2)


def alone() -> Group:
    return Group(0, 1, LocalStore())


# ---- Binary interface ---------------------------------------------------------------------------


def test_offsets_are_those_of_the_headers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not Path("/usr/include/rdma/fi_rma.h").exists():
        pytest.skip("needs gcc and libfabric's headers (Debian package libfabric-dev)")
    program = tmp_path / "abi"
    source = Path(__file__).with_name("efa_abi.c")
    subprocess.run([compiler, str(source), "-o", str(program)], check=True, timeout=60)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    checked = set()
    for line in lines.splitlines():
        name, _, text = line.rpartition(" ")
        if name.startswith("<= "):
            assert int(text) <= getattr(abi, name[3:]), line
        else:
            assert int(text) == getattr(abi, name), line
        checked.add(name.removeprefix("<= "))
    missing = {name for name in vars(abi) if name.isupper() and name[0] != "_"} - checked
    newer = {name for name in missing if name.startswith(("FI_OPT_", "FI_MR_DMABUF", "DMABUF_"))}
    assert missing == newer  # these are not in every version's headers


# ---- Choosing -----------------------------------------------------------------------------------


def test_efa_prefers_the_direct_fabric_and_asks_what_it_needs() -> None:
    direct, layered = FABRICS["efa"]
    assert (direct.fabric, layered.fabric) == ("efa-direct", "efa")
    for fabric in (direct, layered):
        assert fabric.provider == "efa"
        assert fabric.modes & abi.FI_CONTEXT2
        assert fabric.mr_mode & abi.FI_MR_LOCAL
        assert [option.name for option in fabric.must_be_off] == ["FI_OPT_EFA_EMULATED_WRITE"]
        assert fabric.on_gpus
    forced = {option.name: option for option in layered.options}["FI_OPT_EFA_USE_DEVICE_RDMA"]
    assert forced.required
    assert forced.value


def test_names_and_numbers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "must be one of auto, efa" in raised(lambda: openers("infiniband"), ConfigError)
    monkeypatch.setenv("MOECOMM_NICS", "0")
    assert "MOECOMM_NICS='0'" in raised(lambda: openers("tcp"), ConfigError)
    monkeypatch.setenv("MOECOMM_NICS", "3")
    monkeypatch.setenv("MOECOMM_FABRIC", "tcp")
    assert [opener.transport for opener in openers()] == ["tcp"] * 3


def test_auto_is_tcp_where_there_is_no_efa_device() -> None:
    if Path("/sys/module/efa").exists():
        pytest.skip("there is an EFA device")
    assert [opener.transport for opener in openers("auto")] == ["tcp"]
    text = raised(lambda: openers("efa"), TransportUnavailable)
    assert "no interface for 'efa'" in text
    assert "efa-direct of " in text
    assert "No data available" in text
    assert "moecomm doctor" in text


def test_a_library_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_LIBFABRIC", "/nowhere/libfabric.so.1")
    text = raised(lambda: openers("tcp"), TransportUnavailable)
    assert "/nowhere/libfabric.so.1" in text
    assert "pip install" in text


def test_gpu_memory_is_for_fabrics_that_take_it() -> None:
    text = raised(lambda: openers("tcp", cuda_device=0), TransportUnavailable)
    assert "takes no GPU memory" in text


def test_the_transport_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_FABRIC", "tcp")
    with open_memory("efa", alone()) as memory:  # type: ignore[attr-defined]
        assert isinstance(memory, TransferEngine)
        assert memory.allocate(64).nbytes == 64


# ---- Refusals -----------------------------------------------------------------------------------


def open_with(**changes: Any) -> str:
    """Why a changed tcp fabric is refused."""
    import dataclasses

    fabric = dataclasses.replace(fabrics.TCP, **changes)
    opener = openers("tcp")[0]
    opener._fabric = fabric
    return raised(lambda: opener.open(SIZING), TransportUnavailable)


def test_a_provider_that_does_not_tell_whether_it_emulates_is_refused() -> None:
    text = open_with(must_be_off=(EMULATED,))
    assert "does not tell FI_OPT_EFA_EMULATED_WRITE" in text
    assert "libfabric" in text


def test_a_provider_that_emulates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    let_writes_be_emulated(monkeypatch)
    text = open_with(must_be_off=(EMULATED,))
    assert "would emulate RDMA writes by messages" in text
    assert "FI_EFA_USE_DEVICE_RDMA" in text


def test_an_option_that_must_be_set_and_cannot_is_refused_by_name() -> None:
    needed = Option("FI_OPT_EFA_USE_DEVICE_RDMA", abi.FI_OPT_EFA_USE_DEVICE_RDMA, True, True)
    assert "cannot set FI_OPT_EFA_USE_DEVICE_RDMA=True" in open_with(options=(needed,))


def test_an_option_that_may_be_unknown_is_not() -> None:
    assert isinstance(fabrics.EFA_DIRECT.options[0], Option)
    opener = openers("tcp")[0]
    import dataclasses

    opener._fabric = dataclasses.replace(fabrics.TCP, options=fabrics.EFA_DIRECT.options)
    nic = opener.open(SIZING)
    assert nic.limits.tx_depth <= 64
    assert len(nic.address()) > 0
    nic.close()
    nic.close()


def test_a_simulation_is_told_that_time_is_real() -> None:
    group = Group(0, 1, LocalStore(), simulation="threads")
    assert "transport='efa' runs in real time" in raised(
        lambda: open_engine(group, "tcp"), TransportUnavailable
    )


# ---- Errors of real providers -------------------------------------------------------------------


def wrong_key(group: Group) -> str:
    with open_engine(group, "tcp", options=options(timeout_s=3.0)) as engine:
        region = engine.allocate(4096)
        remote = registered(engine, group, region)[1 - group.rank]
        text = ""
        if group.rank == 0:
            key = bytearray(remote.key)
            key[-1] ^= 0x55
            forged = type(remote)(remote.rank, remote.address, 4096, bytes(key))
            operation = engine.write(region, forged, 1)
            text = raised(lambda: engine.wait(operation), TransportError)
        group.barrier()
        return text


def test_a_wrong_key_fails_at_the_writer() -> None:
    text = mc.run(wrong_key, 2, timeout_s=60)[0]
    assert text.startswith("rank 0: a write of 4096 bytes to rank 1 by ")
    assert "(tcp) failed: " in text


def write_to_the_dead(group: Group, fabric: str) -> str:
    engine = open_engine(group, fabric, options=options(timeout_s=2.0))
    region = engine.allocate(1 << 16)
    remote = registered(engine, group, region)
    engine.write(region.part(0, 64), remote[1 - group.rank].part(0, 64), 1)
    engine.wait_imm(1)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    started = time.monotonic()
    operation = engine.write(region, remote[1], 2)
    text = raised(lambda: engine.wait(operation, 10), TransportError)
    assert operation.done
    engine.close()
    assert time.monotonic() - started < 12
    return text


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
def test_a_peer_that_was_killed_is_named_in_time(fabric: str) -> None:
    first, second = outcomes(write_to_the_dead, 2, fabric, timeout_s=60)
    assert second.exit_code == -9
    assert first.error is None, first.error
    assert "rank 1" in first.value


def two_engines(group: Group) -> None:
    engines = [open_engine(group, "shm", options=options()) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.barrier(engine.peer_group(range(group.size)), 5)
        engine.wait_imm(5, group.size)
        assert engine.arrived(5) == 0, number
    for engine in engines:
        engine.close()
    again = open_engine(group, "shm", options=options())
    again.barrier(again.peer_group(range(group.size)), 5)
    again.wait_imm(5, group.size)
    again.close()


def test_several_engines_on_one_group_stay_apart() -> None:
    mc.run(two_engines, 2, timeout_s=60)


def fork(group: Group) -> None:
    fork_after_registering(group, lambda g: open_engine(g, "tcp", options=options()))


def test_f13_a_fork_after_registering_leaves_both_processes_their_memory() -> None:
    mc.run(fork, 2, timeout_s=60)


def test_f13_what_the_engine_registers_for_itself_has_pages_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page that a library keeps from being forked must not have anything else on it."""
    real, seen = FabricNic.register, []

    def register(self: FabricNic, region: Region, **how: Any) -> Registration:
        seen.append(region)
        return real(self, region, **how)

    monkeypatch.setattr(FabricNic, "register", register)
    with open_engine(alone(), "tcp", options=options(message_bytes=100)) as engine:
        engine.allocate(100)
    assert len(seen) == 3  # messages, credits, and that
    pages = [r.address // mmap.PAGESIZE for r in seen]
    assert all(region.address % mmap.PAGESIZE == 0 for region in seen)
    assert len(set(pages)) == 3
