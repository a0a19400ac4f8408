"""How EFA differs from what stands in for it: the list of ``moecomm/transport/efa/fabrics.py``, by
its numbers, where no stand-in shows the difference. A library that says what EFA's would, and is
seen to be told what EFA's must be.

1, 2, 3 and 10 are in ``test_efa.py``, ``test_efa_agreement.py`` and ``test_engine_faults.py``; 5
and 6 are what the fake network is for."""

from __future__ import annotations

import ctypes as C
import dataclasses
import errno
import re
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import fake_nic
import pytest
from engines import on_fake, options
from fake_nic import FakeNetwork
from fake_regattr import DESC, KEY, Asked, Fake, recorded
from test_efa_agreement import opener
from transport_conformance import fill, payload, pump, raised, read, registered

from moecomm.errors import ConfigError, TransportError
from moecomm.group import Group
from moecomm.store_local import LocalStore
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.efa import abi, endpoint, fabrics, openers
from moecomm.transport.efa.fabrics import Fabric
from moecomm.transport.efa.library import Library, half, set_word, text, word
from moecomm.transport.engine import TransferEngine
from moecomm.transport.engine.provider import Sizing

SIZING = Sizing(num_peers=2, tx_depth=24, rx_depth=40, message_bytes=64, num_messages=2)
GPU = 3
GPU_MEMORY = Region(0x7F0000000000, 1 << 20)  # nothing is there

# Which function: its table, its place there, and, since tables are at one offset, its arguments.
Function = tuple[int, int, int]
OPEN_CQ = abi.DOMAIN_OPS, abi.DOMAIN_OPS_CQ_OPEN, 3
SETOPT = abi.EP_OPS, abi.EP_OPS_SETOPT, 4
GETOPT = abi.EP_OPS, abi.EP_OPS_GETOPT, 4
CONTROL = abi.FID_OPS, abi.OPS_CONTROL, 2


class Calls:
    """What an endpoint asks of libfabric: ``answers`` look at every call, and may answer it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = endpoint.call
        self.answers: list[Callable[[Function, tuple[int, ...]], int | None]] = []
        monkeypatch.setattr(endpoint, "call", self._call)

    def _call(self, fid: int, ops: int, place: int, *arguments: int) -> int:
        for answer in self.answers:
            code = answer((ops, place, len(arguments)), arguments)
            if code is not None:
                return code
        return self._real(fid, ops, place, *arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# ---- 4: the handshake ---------------------------------------------------------------------------


def test_4_a_first_write_waits_until_both_ends_poll_and_holds_up_nobody() -> None:
    """Rank 2 does not poll at first: what is for it stays here, what is for rank 1 goes."""
    network = FakeNetwork(3, words={fake_nic.SHAKES_HANDS: 1, fake_nic.REORDER: 1})

    def work(engine: TransferEngine, group: Group) -> None:
        region = engine.allocate(3 * 4096)
        remote = registered(engine, group, region)
        src = engine.allocate(4096)
        fill(src, payload(group.rank, 0, 4096))

        def to(peer: int, imm: int) -> Any:
            return engine.write(src, remote[peer].part(group.rank * 4096, 4096), imm)

        if group.rank == 2:
            with engine._resources.worker.paused():
                group.barrier()
                group.barrier()
        else:
            group.barrier()
            late = to(2, 1)
            engine.wait(to(1 - group.rank, 1))
            end = time.monotonic() + 0.1
            pump(engine, lambda: time.monotonic() > end)
            assert not late.done
            assert network.get(group.rank, fake_nic.HANDSHAKES) > 0
            group.barrier()
            engine.wait(late)
        mine = [to(peer, 2) for peer in range(3) for _ in range(40)]  # rank 2's first ones
        engine.wait_imm(2, 120)
        engine.wait_imm(1, 2 if group.rank == 2 else 1)
        pump(engine, lambda: all(operation.done for operation in mine))
        for sender in range(3):
            assert read(region.part(sender * 4096, 4096)) == payload(sender, 0, 4096)

    on_fake(work, network)
    network.check_promises()


# ---- 7: the completion queue --------------------------------------------------------------------


def test_7_the_completion_queue_has_room_for_all_that_may_be_under_way(calls: Calls) -> None:
    """EFA has no protection against its overrun, so the default size would not do."""
    sizes = []

    def note(which: Function, arguments: tuple[int, ...]) -> None:
        if which == OPEN_CQ:
            sizes.append(word(arguments[0], abi.CQ_ATTR_SIZE))

    calls.answers.append(note)
    for sizing in (SIZING, dataclasses.replace(SIZING, rx_depth=5000)):
        nic = opener().open(sizing)
        assert sizes[-1] >= nic.limits.tx_depth + sizing.rx_depth
        nic.close()
    assert len(sizes) == 2


# ---- 8: GPU memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [fabrics.EFA_DIRECT, fabrics.EFA], ids=lambda fabric: fabric.name)
def test_8_cuda_and_shared_memory_are_forbidden_before_the_endpoint_is_enabled(
    calls: Calls, real: Fabric
) -> None:
    told: list[tuple[int, bool]] = []

    def note(which: Function, arguments: tuple[int, ...]) -> int | None:
        if which == SETOPT:
            level, number, value, nbytes = arguments
            assert (level, nbytes) == (abi.FI_OPT_ENDPOINT, 1)
            told.append((number, C.c_bool.from_address(value).value))
            return 0
        if which == CONTROL:
            assert arguments[0] == abi.FI_ENABLE
            told.append((abi.FI_ENABLE, True))
        return None

    calls.answers.append(note)
    fabric = dataclasses.replace(fabrics.TCP, options=real.options)
    opener(fabric=fabric).open(SIZING).close()
    assert told[-1] == (abi.FI_ENABLE, True)
    assert {(10, False), (11, False)} <= set(told[:-1])  # of libfabric's manual, fi_endpoint(3)
    assert ((abi.FI_OPT_EFA_USE_DEVICE_RDMA, True) in told) == (real is fabrics.EFA)


class Asking:
    """Stands before a loaded libfabric, and reads the hints of ``fi_getinfo``."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.hints: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def fi_getinfo(self, api: int, node: Any, service: Any, flags: int, hints: int, _: Any) -> int:
        names, domain = word(hints, abi.INFO_FABRIC_ATTR), word(hints, abi.INFO_DOMAIN_ATTR)
        self.hints = {
            "api": (api >> 16, api & 0xFFFF),
            "provider": text(word(names, abi.FABRIC_PROV_NAME)),
            "fabric": text(word(names, abi.FABRIC_NAME)),
            "caps": word(hints, abi.INFO_CAPS),
            "mode": word(hints, abi.INFO_MODE),
            "mr_mode": half(domain, abi.DOMAIN_MR_MODE),
        }
        return -abi.FI_ENODATA


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_8_gpu_memory_is_asked_for_where_it_will_be_used(on_gpu: bool) -> None:
    library = Library(openers("tcp")[0]._library.path)
    asking = library._library = Asking(library._library)
    assert library.interfaces(fabrics.EFA_DIRECT, on_gpu) == (-abi.FI_ENODATA, [])
    hints = asking.hints
    assert (hints["provider"], hints["fabric"]) == ("efa", "efa-direct")
    assert hints["api"] >= (1, 18)  # earlier ones leave device RDMA off
    # MSG, RMA, LOCAL_COMM, REMOTE_COMM; HMEM.
    assert hints["caps"] == 1 << 1 | 1 << 2 | 1 << 51 | 1 << 52 | on_gpu << 47
    # LOCAL, VIRT_ADDR, ALLOCATED, PROV_KEY; HMEM.
    assert hints["mr_mode"] == 1 << 2 | 1 << 4 | 1 << 5 | 1 << 6 | on_gpu << 10
    assert hints["mode"] & 1 << 52  # CONTEXT2, which efa-direct wants


@pytest.fixture
def regattr() -> Iterator[Fake]:
    with recorded() as fake:
        yield fake


def test_8_gpu_memory_is_registered_with_its_gpu_or_as_a_dmabuf(regattr: Fake) -> None:
    nic = opener().open(dataclasses.replace(SIZING, cuda_device=GPU))
    place, nbytes = GPU_MEMORY.address, GPU_MEMORY.nbytes
    plain = nic.register(GPU_MEMORY, on_gpu=True)
    assert (plain.local_key, plain.remote_key) == (DESC + 1, KEY + 1)
    both = nic.register(GPU_MEMORY, on_gpu=True, dmabuf_fd=44)
    assert regattr.asked == [
        Asked(iface=1, device=GPU, flags=0, address=place, nbytes=nbytes),
        Asked(iface=1, device=GPU, flags=1 << 40, dmabuf=(44, 0, nbytes, place)),
    ]
    nic.deregister(plain)
    assert regattr.closed == 1
    nic.close()  # with what is left
    assert regattr.closed == 2
    assert both.remote_key == KEY + 2


def test_8_an_engine_registers_gpu_memory_with_each_interface(
    regattr: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecomm.transport.engine.topology.pci_address_of", lambda gpu: "none")
    nics = [opener(), opener()]
    group = Group(0, 1, LocalStore())
    with TransferEngine(group, nics, options=options(), cuda_device=GPU) as engine:
        mine = engine.register(GPU_MEMORY, on_gpu=True, dmabuf_fd=44)
        assert [(a.iface, a.device, a.dmabuf and a.dmabuf[0]) for a in regattr.asked] == [
            (1, GPU, 44)
        ] * 2
        assert engine.register(GPU_MEMORY.part(4096, 64)) == mine.part(4096, 64)
        assert len(regattr.asked) == 2
        assert RemoteRegion.from_bytes(mine.to_bytes()) == mine
        for nic in range(2):
            assert engine.local_place(GPU_MEMORY, nic).key == DESC + 1 + nic
        engine.deregister(GPU_MEMORY)
        assert regattr.closed == 2
        raised(lambda: engine.local_place(GPU_MEMORY, 0), ConfigError)


@pytest.mark.parametrize(
    ("code", "on_gpu", "words"),
    [
        (errno.ENOMEM, False, "4096 bytes must be locked, and `ulimit -l` allows 65536 bytes"),
        (errno.ENOMEM, True, "4096 bytes must be locked, and `ulimit -l` allows 65536 bytes"),
        (errno.EFAULT, True, "needs a driver with dma-buf support, or the nvidia-peermem module"),
        (errno.EFAULT, False, r"\(-14\)$"),
    ],
    ids=["limit", "gpu-limit", "gpu", "other"],
)
def test_f11_memory_that_is_refused_names_the_limit_or_what_a_gpu_needs(
    regattr: Fake, monkeypatch: pytest.MonkeyPatch, code: int, on_gpu: bool, words: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    nic = opener().open(dataclasses.replace(SIZING, cuda_device=GPU))
    regattr.refuse = code
    said = raised(lambda: nic.register(Region(0x7000, 4096), on_gpu=on_gpu), TransportError)
    where = f"GPU {GPU}" if on_gpu else "host memory"
    assert f"(tcp): cannot register 4096 bytes of {where} at 0x7000: " in said
    assert re.search(words, said), said
    nic.close()


# ---- 9: the longest write -----------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False], ids=["tells", "does-not-tell"])
def test_9_the_longest_write_is_what_the_interface_says(calls: Calls, tells: bool) -> None:
    """By its option; one that does not know that has the longest message."""

    def answer(which: Function, arguments: tuple[int, ...]) -> int | None:
        if which != GETOPT or arguments[1] != abi.FI_OPT_MAX_RMA_SIZE:
            return None
        if tells:
            C.c_size_t.from_address(arguments[2]).value = 4096
        return 0 if tells else -abi.FI_ENOPROTOOPT

    def shorter(info: int) -> None:
        set_word(word(info, abi.INFO_EP_ATTR), abi.EP_MAX_MSG_SIZE, 5000)

    calls.answers.append(answer)
    longest = 4096 if tells else 5000
    group = Group(0, 1, LocalStore())
    with TransferEngine(group, [opener(shorter)], options=options()) as engine:
        assert engine.max_write_bytes == longest
        region, src = engine.allocate(10_000), engine.allocate(10_000)
        fill(src, payload(0, 0, 10_000))
        remote = registered(engine, group, region)[0]
        said = raised(lambda: engine.write(src, remote, 1), ConfigError)
        assert f"{longest}" in said
        assert "use shards" in said
        engine.write(src, remote, 1, shards=3)
        engine.wait_imm(1, 3)
        assert read(region) == payload(0, 0, 10_000)


# ---- 11: the environment ------------------------------------------------------------------------


def test_11_variables_that_change_all_this_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Of libfabric's manual, fi_efa(7).
    names = ["IFACE", "USE_DEVICE_RDMA", "FORK_SAFE", "ENABLE_SHM_TRANSFER"]
    names = [f"FI_EFA_{name}" for name in [*names, "USE_UNSOLICITED_WRITE_RECV"]]
    for number, name in enumerate(names):
        monkeypatch.setenv(name, f"value {number}")
    monkeypatch.setenv("FI_LOG_LEVEL", "none")  # changes nothing
    with caplog.at_level("INFO"):
        openers("tcp")
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("libfabric is")]
    assert told == [f"libfabric is told {name}=value {n}" for n, name in enumerate(names)]
