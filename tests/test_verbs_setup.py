"""Sizing queues, registering memory, and what errors say: on a machine without an RDMA device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
from fake_ports import IPV4, IPV6, LOOPBACK, V2, make_port

from moecomm.errors import ConfigError, TransportError, TransportUnavailable
from moecomm.transport.engine.provider import Sizing
from moecomm.transport.verbs import (
    abi,
    devices,
    dmabuf,
    domains,
    library,
    queues,
    statuses,
    structures,
)
from moecomm.transport.verbs.bootstrap import Address
from moecomm.transport.verbs.devices import Limits, choose_ports
from moecomm.transport.verbs.dmabuf import DmaBuf
from moecomm.transport.verbs.gids import Gid
from moecomm.transport.verbs.posting_state import POLL_BATCH

# How deep

MLX5 = Limits(max_qp=131072, max_qp_wr=32768, max_cqe=4194303, max_srq_wr=32767)
RXE = Limits(max_qp=1048576, max_qp_wr=1048576, max_cqe=32767, max_srq_wr=1048576)


@pytest.mark.parametrize("limits", [MLX5, RXE], ids=["mlx5", "rxe"])
@pytest.mark.parametrize("num_peers", [1, 8, 64, 512])
@pytest.mark.parametrize("num_messages", [0, 256])
def test_queues_cannot_overrun(limits: Limits, num_peers: int, num_messages: int) -> None:
    sizing = Sizing(num_peers, 1024, 16 * num_peers, 64, num_messages)
    room = queues.depths(sizing, limits, "x")
    own = num_peers * 2  # the last step of connecting: one request per queue pair
    assert room.completions >= room.posts + sizing.rx_depth + num_messages + own
    assert room.completions <= limits.max_cqe
    assert 1 <= room.send <= room.posts <= sizing.tx_depth
    assert room.send < limits.max_qp_wr
    # Those of one poll wait for the next one to be posted again.
    assert sizing.rx_depth + POLL_BATCH <= room.receive <= limits.max_srq_wr


def test_a_device_that_is_too_small() -> None:
    many = Sizing(2048, tx_depth=1024, rx_depth=32768, message_bytes=0, num_messages=0)
    with pytest.raises(TransportUnavailable, match="mlx5_0 port 1: 32768 arrivals of 2048 peers"):
        queues.depths(many, RXE, "mlx5_0 port 1")
    few = Limits(max_qp=16, max_qp_wr=100, max_cqe=100000, max_srq_wr=1000)
    sizing = Sizing(8, tx_depth=1024, rx_depth=100, message_bytes=64, num_messages=16)
    with pytest.raises(TransportUnavailable, match="need 17 queue pairs, it has 16"):
        queues.depths(sizing, few, "x")


def test_connection_parameters_are_checked() -> None:
    for name, highest in (("timeout", 31), ("retry_count", 7), ("traffic_class", 255)):
        for bad in (-1, highest + 1, 1.0, True):
            with pytest.raises(ConfigError, match=f"{name}={bad!r}: .* 0 to {highest}"):
                queues.Parameters(**{name: bad})


# Registering


class FakeLibrary:
    """Registers at made-up addresses; refuses with an error number where it is told to."""

    def __init__(self, plain: int = 0, dmabuf: int | None = 0) -> None:
        self._refuse = {"plain": plain, "dmabuf": dmabuf}
        self.calls: list[tuple[Any, ...]] = []
        self._objects = [(ctypes.c_uint8 * 48)() for _ in range(8)]
        if dmabuf is not None:
            self.ibv_reg_dmabuf_mr = self._dmabuf

    def ibv_alloc_pd(self, context: int) -> int:
        return 0x9000

    def ibv_dealloc_pd(self, domain: int) -> int:
        self.calls.append(("dealloc", domain))
        return 0

    def ibv_reg_mr_iova2(self, pd: int, address: int, nbytes: int, iova: int, access: int) -> int:
        self.calls.append(("plain", address, nbytes, iova, access))
        return self._registered("plain")

    def _dmabuf(self, pd: int, offset: int, nbytes: int, iova: int, fd: int, access: int) -> int:
        self.calls.append(("dmabuf", offset, nbytes, iova, fd, access))
        return self._registered("dmabuf")

    def ibv_dereg_mr(self, handle: int) -> int:
        self.calls.append(("dereg", handle))
        return 0

    def _registered(self, how: str) -> int:
        code = self._refuse[how]
        if code:
            ctypes.set_errno(code)
            return 0
        place = ctypes.addressof(self._objects[len(self.calls)])
        ctypes.c_uint32.from_address(place + abi.MR_LKEY).value = 111
        ctypes.c_uint32.from_address(place + abi.MR_RKEY).value = 222
        return place


class FakeDevice:
    """A driver without thread domains: its context says that no ``verbs_context`` is around it."""

    port = "mlx5_0 port 1"

    def __init__(self) -> None:
        self._memory = (ctypes.c_uint64 * 64)()
        self.context = ctypes.addressof(self._memory)


def domain(monkeypatch: pytest.MonkeyPatch, fake: FakeLibrary) -> domains.ProtectionDomain:
    monkeypatch.setattr(domains, "library", lambda: fake)
    device: Any = FakeDevice()
    return domains.ProtectionDomain(device)


def test_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary()
    pd = domain(monkeypatch, fake)
    assert pd.queues == pd.plain  # no parent domain here
    keys = pd.register(0x7000, 4096)
    assert (keys.local, keys.remote, keys.by_dmabuf) == (111, 222, False)
    assert fake.calls == [("plain", 0x7000, 4096, 0x7000, domains.ACCESS)]
    assert domains.ACCESS & abi.RELAXED_ORDERING
    pd.close()
    pd.close()
    assert fake.calls[1:] == [("dereg", keys.handle), ("dealloc", 0x9000)]


def test_gpu_memory_by_dmabuf(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary()
    keys = domain(monkeypatch, fake).register(0x7000, 4096, dmabuf=DmaBuf(33, 512), on_gpu=True)
    assert keys.by_dmabuf
    assert fake.calls == [("dmabuf", 512, 4096, 0x7000, 33, domains.ACCESS)]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, None])
def test_gpu_memory_without_dmabuf(monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """The kernel, the driver or the library (``None``) has no dma-buf: register the address."""
    fake = FakeLibrary(dmabuf=code)
    keys = domain(monkeypatch, fake).register(0x7000, 4096, dmabuf=DmaBuf(33, 512), on_gpu=True)
    assert not keys.by_dmabuf
    assert fake.calls[-1] == ("plain", 0x7000, 4096, 0x7000, domains.ACCESS)


def test_gpu_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary(plain=errno.EFAULT, dmabuf=errno.EOPNOTSUPP)
    with pytest.raises(TransportError, match=r"mlx5_0 port 1: 4096 bytes: .*nvidia-peermem"):
        domain(monkeypatch, fake).register(0x7000, 4096, dmabuf=DmaBuf(33, 512), on_gpu=True)


def test_a_dmabuf_that_is_refused_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory left is no reason to try another way."""
    fake = FakeLibrary(dmabuf=errno.ENOMEM)
    with pytest.raises(library.VerbsError, match="ibv_reg_dmabuf_mr") as caught:
        domain(monkeypatch, fake).register(0x7000, 4096, dmabuf=DmaBuf(33, 512), on_gpu=True)
    assert caught.value.code == errno.ENOMEM
    assert len(fake.calls) == 1


class FakeCuda:
    """Exports whole pages, as the driver does, or refuses."""

    class CUmemRangeHandleType:
        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.ranges: list[tuple[int, int]] = []

    def cuMemGetHandleForAddressRange(
        self, address: int, nbytes: int, kind: int, flags: int
    ) -> tuple[int, int]:
        assert address % 4096 == nbytes % 4096 == 0
        assert (kind, flags) == (1, 0)
        self.ranges.append((address, nbytes))
        return self._status, 44


@pytest.mark.parametrize(
    ("supported", "status", "expected"),
    [(1, 0, DmaBuf(44, 100)), (0, 0, None), (1, 801, None)],
    ids=["exported", "old-driver", "refused"],
)
def test_a_dmabuf_of_gpu_memory(
    monkeypatch: pytest.MonkeyPatch, supported: int, status: int, expected: DmaBuf | None
) -> None:
    cuda = FakeCuda(status)
    monkeypatch.setattr(dmabuf, "attribute", lambda index, name: supported)
    monkeypatch.setattr(dmabuf, "current", lambda index: contextlib.nullcontext(cuda))
    assert dmabuf.export(0, 0x7000 + 100, 8192) == expected
    assert cuda.ranges == ([(0x7000, 3 * 4096)] if supported else [])


def test_the_limit_of_locked_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary(plain=errno.ENOMEM)
    with pytest.raises(library.VerbsError, match=r"4096 bytes must be locked, and `ulimit -l`"):
        domain(monkeypatch, fake).register(0x7000, 4096)


def test_single_threaded_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has them: queues are made in the parent domain, memory in the plain one."""
    made: list[Any] = []
    pointer, number = ctypes.c_void_p, ctypes.c_int

    @ctypes.CFUNCTYPE(pointer, pointer, pointer)
    def alloc_td(context: int, attributes: int) -> int:
        made.append("thread domain")
        return 0x1000

    @ctypes.CFUNCTYPE(pointer, pointer, pointer)
    def alloc_parent(context: int, attributes: int) -> int:
        given = structures.ParentDomainInitAttr.from_address(attributes)
        made.append((given.pd, given.td))
        return 0x2000

    @ctypes.CFUNCTYPE(number, pointer)
    def dealloc_td(thread_domain: int) -> int:
        made.append(("gone", thread_domain))
        return 0

    fake, device, room = FakeLibrary(), FakeDevice(), (ctypes.c_uint64 * 128)()
    device.context = ctypes.addressof(room) + 512
    words = {
        abi.CONTEXT_ABI_COMPAT: abi.ABI_IS_EXTENDED,
        abi.VERBS_SIZE: 1000,
        abi.VERBS_ALLOC_TD: ctypes.cast(alloc_td, pointer).value,
        abi.VERBS_DEALLOC_TD: ctypes.cast(dealloc_td, pointer).value,
        abi.VERBS_ALLOC_PARENT_DOMAIN: ctypes.cast(alloc_parent, pointer).value,
    }
    for offset, value in words.items():
        ctypes.c_uint64.from_address(device.context + offset).value = value or 0
    monkeypatch.setattr(domains, "library", lambda: fake)
    anything: Any = device
    pd = domains.ProtectionDomain(anything)
    assert (pd.plain, pd.queues) == (0x9000, 0x2000)
    assert made == ["thread domain", (0x9000, 0x1000)]
    pd.close()
    assert fake.calls == [("dealloc", 0x2000), ("dealloc", 0x9000)]
    assert made[-1] == ("gone", 0x1000)
    # a library from before there were thread domains
    ctypes.c_uint64.from_address(device.context + abi.VERBS_SIZE).value = 400
    assert domains.ProtectionDomain(anything).queues == 0x9000


# What errors say


def test_a_failure_names_device_port_peer_and_operation() -> None:
    error = statuses.failure("mlx5_0 port 1", "write", 3, statuses.RETRY_EXC_ERR, 0x81)
    assert str(error) == (
        "mlx5_0 port 1: write to peer 3 failed: the peer does not answer: it has ended, or the "
        "network lost it (IBV_WC_RETRY_EXC_ERR, device's code 0x81)"
    )
    assert (error.transport, error.peer, error.operation, error.code) == ("verbs", 3, "write", 12)


def test_every_status_is_explained() -> None:
    assert "IBV_WC_REM_ACCESS_ERR" in statuses.explain(statuses.REM_ACCESS_ERR)
    assert "unknown completion status 99" in statuses.explain(99)
    assert statuses.explain(-errno.ENOMEM) == f"Cannot allocate memory (errno {errno.ENOMEM})"


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(library.VerbsError("ibv_create_qp", errno.ENOMEM, "mlx5_0")))
    assert isinstance(error, library.VerbsError)
    assert error.code == errno.ENOMEM
    assert "mlx5_0: ibv_create_qp failed" in str(error)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NAME", "libibverbs-that-is-not-there.so")
    with pytest.raises(TransportUnavailable, match="install libibverbs1"):
        library.library.__wrapped__()


class Loaded:
    """A libibverbs that says ``status`` about forks (``None``: it cannot be asked)."""

    def __init__(self, status: int | None) -> None:
        self.prepared = 0
        for name in library._FUNCTIONS:
            setattr(self, name, lambda: 0)
        if status is None:
            del self.ibv_is_fork_initialized  # type: ignore[attr-defined]
        else:
            self.ibv_is_fork_initialized = lambda: status
        self.ibv_fork_init = self._prepare

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if isinstance(value, int) else Function(value))

    def _prepare(self) -> int:
        self.prepared += 1
        return 0


class Function:
    """As of ctypes: with types."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


@pytest.mark.parametrize(("status", "prepared"), [(None, 1), (0, 1), (1, 1), (2, 0)])
def test_f13_pages_are_kept_from_children_only_where_the_kernel_does_not_copy_them(
    monkeypatch: pytest.MonkeyPatch, status: int | None, prepared: int
) -> None:
    loaded = Loaded(status)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name, use_errno: loaded)
    assert library.library.__wrapped__() is loaded
    assert loaded.prepared == prepared


def test_a_kernel_device_that_the_library_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Empty:
        @staticmethod
        def ibv_get_device_list(count: Any) -> Any:
            return (ctypes.c_void_p * 1)()

        @staticmethod
        def ibv_free_device_list(devices: Any) -> None: ...

    monkeypatch.setattr(devices, "library", lambda: Empty)
    make_port(tmp_path, "mlx5_0", {0: (IPV4, V2)})
    with pytest.raises(TransportUnavailable, match=r"the kernel has mlx5_0.*ibverbs-providers"):
        devices.Device(choose_ports(None, tmp_path)[0])


def test_addresses_travel() -> None:
    address = Address(b"nonce678", True, bytes(range(16)), 0x1234, 77, 88)
    assert Address.from_bytes(address.to_bytes()) == address
    for bad in (b"", address.to_bytes()[:-1], b"ib00" + address.to_bytes()[4:]):
        with pytest.raises(ValueError, match="not an address"):
            Address.from_bytes(bad)


def test_kinds_of_addresses() -> None:
    mine = Gid(3, bytes.fromhex(IPV4.replace(":", "")), V2)
    assert str(mine.address) == "10.0.0.1"
    assert queues.same_kind(mine, bytes.fromhex(LOOPBACK.replace(":", "")))
    assert not queues.same_kind(mine, bytes.fromhex(IPV6.replace(":", "")))
