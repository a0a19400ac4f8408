"""The nvlink transport over a driver that is not there: real processes, sockets and mappings.

What a GPU alone can show is in test_gpu_nvlink.py.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import transport_conformance as conformance
from fake_cuda import GRANULARITY, FakeDriver, FakeGpu, installed
from threads import run_threads

import moecomm as mc
from moecomm import cuda_driver
from moecomm.run import Outcome, outcomes
from moecomm.transport import descriptors, gpu_survey, open_gpu_memory, open_memory
from moecomm.transport.base import Memory, Region, Transfer
from moecomm.transport.descriptors import Mailbox
from moecomm.transport.loopback_gpu import ThreadMemory
from moecomm.transport.nvlink import NvlinkMemory

A, B, C = "GPU-a", "GPU-b", "GPU-c"
TIMEOUT_S = 20.0


def two_gpus(**fields: Any) -> list[FakeGpu]:
    return [FakeGpu(A, **fields), FakeGpu(B, **fields)]


def nothing_is_left(driver: FakeDriver) -> bool:
    gc.collect()
    return not +driver.live


# ---- between processes ---------------------------------------------------------------------


def in_process(group: mc.Group, gpus: list[FakeGpu], index: int, work: Any, *args: Any) -> Any:
    """One rank: ``work(group, index, driver, *args)`` with a driver of its own."""
    with installed(FakeDriver(gpus)) as driver:
        return work(group, index, driver, *args)


def each_its_own(group: mc.Group, seen: list[list[FakeGpu]], work: Any, *args: Any) -> Any:
    """Ranks that see different GPUs, each as number 0."""
    return in_process(group, seen[group.rank], 0, work, *args)


def conform(group: mc.Group, index: int, driver: FakeDriver) -> None:
    for name in conformance.MEMORY_CHECKS:
        if group.size == 1 and name == "unequal_sizes_are_refused_on_all_ranks":
            continue
        try:
            conformance.run_check(group, lambda g: NvlinkMemory(g, index), name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise
    assert nothing_is_left(driver), driver.live


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_memory_conforms_between_processes_on_one_gpu(num_ranks: int) -> None:
    mc.run(in_process, num_ranks, two_gpus(), 1, conform)


def test_processes_that_see_different_gpus_as_number_0() -> None:  # F02
    mc.run(each_its_own, 3, [[FakeGpu(A)], [FakeGpu(B), FakeGpu(A)], [FakeGpu(C)]], conform)


def share_until_killed(group: mc.Group, index: int, driver: FakeDriver) -> bytes:
    memory = NvlinkMemory(group, index)
    region = memory.allocate(4096)
    conformance.fill(region, bytes([group.rank]) * 4096)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
    there = Region(memory.peer_pointer(1), 4096)
    found = conformance.read(there)
    conformance.fill(there, bytes(4096))  # what a kernel may still do
    memory.close()
    return found


def test_the_memory_of_a_killed_rank_stays_mapped() -> None:
    first, second = outcomes(in_process, 2, two_gpus(), 0, share_until_killed, timeout_s=30)
    assert first.value == bytes([1]) * 4096
    assert second.exit_code == -9


def absent(group: mc.Group, index: int, driver: FakeDriver) -> str:
    if group.rank == 1:
        return "absent"
    started = time.monotonic()
    with pytest.raises(mc.PeerTimeout) as caught:
        NvlinkMemory(group, index, timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert caught.value.peer == 1
    return caught.value.phase


def test_an_absent_rank_is_a_timeout() -> None:
    found = mc.run(in_process, 3, two_gpus(), 0, absent)
    assert found == ["allocate", "absent", "allocate"]


def leaves_early(group: mc.Group, index: int, driver: FakeDriver) -> str:
    memory = NvlinkMemory(group, index, timeout_s=1.0)
    if group.rank == 1:
        os._exit(3)
    with pytest.raises(mc.TransportError) as caught:
        memory.allocate(4096)
    memory.close()
    assert nothing_is_left(driver)
    return str(caught.value)


def test_a_rank_that_dies_before_allocating_is_an_error() -> None:
    found: list[Outcome] = outcomes(in_process, 2, two_gpus(), 0, leaves_early, timeout_s=30)
    assert "waiting for rank 1 in allocate" in str(found[0].value)


# ---- agreement on failures: threads are enough ----------------------------------------------


def fails(
    make: Callable[[mc.Group], object], num_ranks: int, kind: type[Exception]
) -> list[Exception]:
    """The error that every rank must raise."""

    def one(group: mc.Group) -> Exception:
        with pytest.raises(kind) as caught:
            make(group)
        return caught.value

    return run_threads(one, num_ranks)


def test_f01_pairs_without_access_are_named_before_anything_is_allocated() -> None:
    gpus = [FakeGpu(A), FakeGpu(B, closed=(C,)), FakeGpu(C, closed=(B,))]
    with installed(FakeDriver(gpus)) as driver:
        errors = fails(lambda g: NvlinkMemory(g, g.rank), 3, mc.TransportUnavailable)
        assert {str(e) for e in errors} == {
            "transport='nvlink': GPUs without access to each other's memory: ranks 1→2, 2→1; "
            "`nvidia-smi topo -p2p r` shows which GPUs have it"
        }
        assert not +driver.live


def test_f04_mig_is_named() -> None:
    name = "NVIDIA H200 MIG 1g.18gb"
    with installed(FakeDriver([FakeGpu(A, name), FakeGpu(B, name)])):
        errors = fails(lambda g: NvlinkMemory(g, g.rank), 2, mc.TransportUnavailable)
        assert all("MIG slices have no access" in str(e) and "0→1, 1→0" in str(e) for e in errors)
        run_threads(lambda g: NvlinkMemory(g, 1).close(), 2)  # one slice, two ranks


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "rank 1: its GPU has no virtual memory"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "rank 1: its GPU cannot share memory"),
    ],
)
def test_a_gpu_that_cannot_share_is_named_on_all_ranks(attribute: str, text: str) -> None:
    gpus = [FakeGpu(A), FakeGpu(B, attributes={attribute: 0})]
    with installed(FakeDriver(gpus)):
        for error in fails(lambda g: NvlinkMemory(g, g.rank), 2, mc.TransportUnavailable):
            assert text in str(error)


def test_other_machines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of_call = iter(range(3))
    monkeypatch.setattr(gpu_survey, "machine", lambda: f"machine {next(rank_of_call) // 2}")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    with installed(FakeDriver(two_gpus())):
        for error in fails(lambda g: NvlinkMemory(g, 0), 3, mc.TransportUnavailable):
            assert "rank 0 is on node7, rank" in str(error)
            assert "between machines use 'verbs' or 'efa'" in str(error)


def test_a_device_that_is_not_there_is_everybodys_error() -> None:
    with installed(FakeDriver(two_gpus())):
        for error in fails(lambda g: NvlinkMemory(g, g.rank + 1), 2, mc.TransportUnavailable):
            assert "rank 1: device='cuda:2': this process sees 2 GPUs" in str(error)


def test_d18_too_little_memory_is_said_with_numbers() -> None:
    gpus = [FakeGpu(A), FakeGpu(B, free=3 << 20)]
    with installed(FakeDriver(gpus)) as driver:

        def allocate(group: mc.Group) -> Exception:
            with NvlinkMemory(group, group.rank) as memory:
                with pytest.raises(mc.TransportError) as caught:
                    memory.allocate(5 << 20)
                memory.allocate(1 << 20)  # the failure has left nothing behind
            return caught.value

        healthy, short = run_threads(allocate, 2)
        assert isinstance(short, MemoryError)
        assert isinstance(short, mc.OutOfMemory)
        assert (short.needed, short.free, short.where) == (6 << 20, 3 << 20, "GPU 1")
        assert not isinstance(healthy, MemoryError)
        assert "rank 1 could not allocate: OutOfMemory: GPU 1 has 3.0 MiB free" in str(healthy)
        assert healthy.peer == 1
        assert nothing_is_left(driver)


@pytest.mark.parametrize(
    "function",
    ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemSetAccess"],
)
@pytest.mark.parametrize("kind", [NvlinkMemory, ThreadMemory])
def test_a_failing_driver_call_is_an_error_on_every_rank(
    function: str, kind: type[NvlinkMemory]
) -> None:
    if kind is ThreadMemory and function != "cuMemSetAccess":
        return
    with installed(FakeDriver(two_gpus(), fail=(function,))) as driver:

        def allocate(group: mc.Group) -> str:
            with kind(group, group.rank, timeout_s=1.0) as memory:
                with pytest.raises(mc.MoecommError) as caught:
                    memory.allocate(4096)
                driver.fail.clear()
                group.barrier()
                memory.allocate(4096)
            return str(caught.value)

        for message in run_threads(allocate, 2):
            assert function in message
        assert nothing_is_left(driver)


def test_one_rank_that_cannot_map_a_peer_names_both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(FakeDriver([FakeGpu(A), FakeGpu(B, "NVIDIA Other")])) as driver:
        real = driver.cuMemImportFromShareableHandle

        def fail_on_b(fd: int, kind: Any) -> Any:
            if int(driver.cuCtxGetCurrent()[1]) == 1001:
                return (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
            return real(fd, kind)

        fail_on_b.__name__ = "cuMemImportFromShareableHandle"
        monkeypatch.setattr(driver, "cuMemImportFromShareableHandle", fail_on_b)

        def allocate(group: mc.Group) -> str:
            with (
                NvlinkMemory(group, group.rank) as memory,
                pytest.raises(mc.TransportError) as caught,
            ):
                memory.allocate(4096)
            return str(caught.value)

        messages = run_threads(allocate, 2)
        for message in messages:
            assert "NVIDIA Other" in message
            assert "cannot map the memory of rank 0 on NVIDIA Fake" in message
        assert messages[0].startswith("rank 1 could not allocate: TransportError: ")
        assert nothing_is_left(driver)


# ---- life and death --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NvlinkMemory, ThreadMemory])
def test_closing_in_any_order_leaves_nothing(kind: type[NvlinkMemory]) -> None:
    gpus = two_gpus()
    with installed(FakeDriver(gpus)) as driver:

        def once(group: mc.Group) -> None:
            for n in range(10):  # D11, D12
                memory = kind(group, group.rank % 2)
                memory.allocate(1 + n)
                memory.allocate(GRANULARITY + 1)
                assert memory.taken_bytes == 3 * GRANULARITY
                time.sleep(random.Random(f"{group.rank} {n}").random() * 0.01)
                memory.close()

        run_threads(once, 3)
        assert nothing_is_left(driver), driver.live
        assert [gpu.free for gpu in gpus] == [1 << 30] * 2


@pytest.mark.parametrize("name", list(conformance.MEMORY_CHECKS))
def test_threads_of_one_process_conform(name: str) -> None:
    with installed(FakeDriver(two_gpus())) as driver:
        run_threads(
            lambda g: conformance.run_check(g, lambda h: ThreadMemory(h, h.rank % 2), name), 3
        )
        assert nothing_is_left(driver)


def test_memory_that_nobody_closed_goes_with_its_last_reference() -> None:  # D08
    with installed(FakeDriver(two_gpus())) as driver:

        def forget(group: mc.Group) -> None:
            NvlinkMemory(group, 0).allocate(4096)

        run_threads(forget, 2)
        assert nothing_is_left(driver)


def test_the_protocol_is_memory_and_no_more() -> None:
    with installed(FakeDriver(two_gpus())) as driver:
        (memory,) = run_threads(lambda g: NvlinkMemory(g, 0), 1)
        assert not [entry for entry in driver.log if entry[0] == "context"]  # none to look around
        assert isinstance(memory, Memory)
        assert not isinstance(memory, Transfer)
        memory.close()


def test_the_callers_device_stays_current() -> None:  # F03
    with installed(FakeDriver(two_gpus())) as driver:

        def on_the_other(group: mc.Group) -> tuple[int | None, int | None]:
            before = cuda_driver.current_device()
            with NvlinkMemory(group, 1) as memory:
                memory.allocate(1)
            untouched = cuda_driver.current_device()
            driver.cuCtxSetCurrent(driver.real.CUcontext(1000))
            with NvlinkMemory(group, 1) as memory:
                memory.allocate(1)
            assert before is None
            return untouched, cuda_driver.current_device()

        assert run_threads(on_the_other, 2) == [(None, 0)] * 2


# ---- passing descriptors -----------------------------------------------------------------------


def test_many_ranks_swap_descriptors_without_a_jam() -> None:
    def swap(group: mc.Group) -> None:
        box = Mailbox(group.rank)
        fd = os.memfd_create(f"rank {group.rank}")
        os.write(fd, b"%d" % group.rank)
        told = group.all_gather(f"{box.name} {box.password.hex()}".encode())
        peers = [(t.split()[0].decode(), bytes.fromhex(t.split()[1].decode())) for t in told]
        for _ in range(3):
            got = box.exchange(fd, peers, TIMEOUT_S)
            assert {r: os.pread(f, 10, 0) for r, f in got.items()} == {
                r: b"%d" % r for r in range(group.size) if r != group.rank
            }
            assert not any(os.get_inheritable(f) for f in got.values())
            descriptors.close_all(got)
            group.barrier()
        os.close(fd)
        box.close()

    before = len(os.listdir("/proc/self/fd"))
    run_threads(swap, 24)
    assert len(os.listdir("/proc/self/fd")) == before


def test_strangers_are_not_listened_to() -> None:
    def swap(group: mc.Group) -> None:
        box = Mailbox(group.rank)
        told = [b.decode() for b in group.all_gather(box.name.encode())]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for junk in (b"", b"x" * 500, bytes(24)):
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("2i", 0, 1))
                stranger.sendmsg([junk], [rights], 0, f"\0{told[group.rank]}")
                stranger.sendto(junk, f"\0{told[group.rank]}")
        words = [bytes.fromhex(b.decode()) for b in group.all_gather(box.password.hex().encode())]
        fd = os.memfd_create("mine")
        got = box.exchange(fd, list(zip(told, words, strict=True)), TIMEOUT_S)
        assert list(got) == [1 - group.rank]
        descriptors.close_all(got)
        os.close(fd)
        box.close()

    before = len(os.listdir("/proc/self/fd"))
    run_threads(swap, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_sends_nothing_is_named() -> None:
    silent, box = Mailbox(0), Mailbox(1)
    with pytest.raises(mc.PeerTimeout) as caught:
        box.exchange(0, [(silent.name, silent.password), (box.name, box.password)], 0.2)
    assert (caught.value.peer, caught.value.rank, caught.value.seen) == (0, 1, 1)
    silent.close()
    with pytest.raises(mc.TransportError, match="cannot pass a file descriptor to rank 0"):
        box.exchange(0, [(silent.name, silent.password), (box.name, box.password)], 0.2)
    box.close()


# ---- choosing --------------------------------------------------------------------------------


def test_auto_is_loopback_for_threads_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with installed(FakeDriver(two_gpus())), caplog.at_level(logging.INFO, "moecomm.transport"):
        found = run_threads(lambda g: open_gpu_memory("auto", g, 0), 2)
        assert [type(m) for m in found] == [ThreadMemory] * 2
        for memory in found:
            memory.close()
    assert "rank 1: transport 'loopback': the ranks are threads of one process" in caplog.text


def auto(group: mc.Group, index: int, driver: FakeDriver) -> str:
    with open_gpu_memory("auto", group, index) as memory:
        return type(memory).__name__


def test_auto_is_nvlink_for_processes() -> None:
    assert mc.run(in_process, 2, two_gpus(), 0, auto) == ["NvlinkMemory"] * 2


def loopback(group: mc.Group, index: int, driver: FakeDriver) -> str:
    memory = open_gpu_memory("loopback", group, index)
    with memory, pytest.raises(mc.TransportUnavailable) as caught:
        memory.allocate(1)
    return str(caught.value)


def test_loopback_refuses_processes_on_gpus() -> None:
    for message in mc.run(in_process, 2, two_gpus(), 0, loopback):
        assert "joins threads of one process; use 'nvlink'" in message


def test_names_are_checked() -> None:
    (group,) = run_threads(lambda g: g, 1)
    with pytest.raises(mc.TransportUnavailable, match="'nvlink' joins GPUs"):
        open_memory("nvlink", group)
    with pytest.raises(mc.ConfigError, match="transport='ether': must be one of"):
        open_gpu_memory("ether", group, 0)
    with pytest.raises(mc.TransportUnavailable, match="'efa' has no memory on GPUs"):
        open_gpu_memory("efa", group, 0)
