"""The nvshmem transport without GPUs: a heap for the life of the process, agreements, versions.

What a GPU alone can show is in test_gpu_nvshmem.py; the kernels' puts are in test_remote.py.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transport_conformance as conformance
from fake_cuda import FakeDriver, FakeGpu, installed
from fake_nvshmem import FakeLibrary, played
from threads import run_threads

import moecomm as mc
from moecomm.kernels import nvshmem_link
from moecomm.kernels.nvshmem_link import Copy
from moecomm.kernels.stages import STAGES
from moecomm.remote import Remote
from moecomm.transport.nvshmem import NvshmemMemory, finalize

GPUS = [FakeGpu("GPU-a"), FakeGpu("GPU-b")]
MiB = 1 << 20


def in_process(
    group: mc.Group, folder: Path, work: Callable[..., Any], options: dict[str, Any], *args: Any
) -> Any:
    """One rank: ``work(group, library, *args)`` with a driver and a library of its own."""
    with installed(FakeDriver(GPUS)), played(FakeLibrary(folder, **options)) as library:
        return work(group, library, *args)


def run(num_ranks: int, folder: Path, work: Any, *args: Any, **options: Any) -> list[Any]:
    return mc.run(in_process, num_ranks, folder, work, options, *args)


def conform(group: mc.Group, library: FakeLibrary) -> None:
    for name in conformance.MEMORY_CHECKS:
        if group.size == 1 and name == "unequal_sizes_are_refused_on_all_ranks":
            continue
        try:
            conformance.run_check(group, lambda g: NvshmemMemory(g, 0), name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise
    assert library.calls["init"] == 1
    assert library.calls["unique_id"] == (group.rank == 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_memory_conforms(num_ranks: int, tmp_path: Path) -> None:
    run(num_ranks, tmp_path, conform)


def close_and_open(group: mc.Group, library: FakeLibrary) -> None:
    first = NvshmemMemory(group, 0)
    region = first.allocate(MiB)
    conformance.fill(region, b"x" * MiB)
    if group.rank == 1:
        first.close()
    with NvshmemMemory(group, 0) as second:  # rank 0 still uses the first
        assert second.allocate(MiB).address != region.address
        first.close()
        first.close()
        third = second.allocate(MiB)
        assert third.address == region.address
        assert conformance.read(third) == bytes(MiB)
        assert second.taken_bytes >= 2 * MiB
    assert (library.calls["init"], library.calls["allocate"]) == (1, 2)
    with NvshmemMemory(group, 0) as bigger:  # nothing fits: what all gave back is freed first
        bigger.allocate(8 * MiB)
        assert library.calls["free"] == 2
    group.barrier()


def test_memory_is_used_again_once_all_ranks_have_closed(tmp_path: Path) -> None:
    run(2, tmp_path, close_and_open)


def sees(group: mc.Group, library: FakeLibrary, forbidding: int | None) -> Any:
    if group.rank == forbidding:
        os.environ["MOECOMM_NVSHMEM_NO_POINTERS"] = "1"
    with NvshmemMemory(group, 0) as memory:
        region = memory.allocate(64)
        pointers = [memory.peer_pointer(rank) is not None for rank in range(group.size)]
        heaps = [memory.heap_pointer(rank, region) is not None for rank in range(group.size)]
        group.barrier()
        everybody = memory.everybody_reachable(region), memory.everybody_mapped(region)
    return pointers, heaps, everybody


def test_a_peer_that_is_not_mapped_has_no_pointer(tmp_path: Path) -> None:
    near, near_too, far = run(3, tmp_path, sees, None, apart=(2,))
    assert near == ([True, True, False], [True, True, False], (False, False))
    assert near_too[0] == [True, True, False]
    assert far[0] == [False, False, True]


def test_one_rank_that_must_not_use_pointers_is_enough(tmp_path: Path) -> None:
    for rank, found in enumerate(run(2, tmp_path, sees, 1)):
        assert found[0] == [rank == 0, rank == 1]
        assert found[1:] == ([True, True], (False, True))


def other_order(group: mc.Group, library: FakeLibrary) -> str:
    with NvshmemMemory(group, 0) as memory:
        memory.allocate(64)
    turned = group.subgroup([1, 0])
    assert turned is not None
    with pytest.raises(mc.TransportUnavailable) as caught:
        NvshmemMemory(turned, 0)
    with pytest.raises(mc.TransportUnavailable, match="2 ranks on GPU 0"):
        NvshmemMemory(group, 1)
    with NvshmemMemory(group, 0) as memory:
        memory.allocate(64)
    group.barrier()
    return str(caught.value)


def test_other_ranks_need_other_processes(tmp_path: Path) -> None:
    first, second = run(2, tmp_path, other_order)
    assert first == second
    assert "for one list of ranks at a time" in first


def finalize_and_start(group: mc.Group, library: FakeLibrary) -> None:
    texts = []
    with pytest.raises(mc.StateError) as caught:
        finalize(group)
    texts.append(str(caught.value))
    first = NvshmemMemory(group, 0)
    first.allocate(MiB)
    if group.rank == 0:
        first.close()
    group.barrier()
    with pytest.raises(mc.StateError) as caught:
        finalize(group)
    texts.append(str(caught.value))
    assert "rank 0: new; rank 1: new" in texts[0]
    assert "ranks 1 still have communicators open" in texts[1]
    group.barrier()
    first.close()
    finalize(group)
    with NvshmemMemory(group, 0) as again:
        region = again.allocate(MiB)
        assert conformance.read(region) == bytes(MiB)
        group.barrier()
    assert (library.calls["init"], library.calls["finalize"]) == (2, 1)


def test_finalized_and_started_again(tmp_path: Path) -> None:
    run(2, tmp_path, finalize_and_start)


def start_bigger(group: mc.Group, library: FakeLibrary, users: str | None) -> list[str]:
    if users is not None:
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = users
    sizes = []
    for heap_bytes in (MiB, 1024 * MiB):
        with NvshmemMemory(group, 0, heap_bytes=heap_bytes) as memory:
            memory.allocate(MiB)
        sizes.append(os.environ["NVSHMEM_SYMMETRIC_SIZE"])
        finalize(group)
    return sizes


@pytest.mark.parametrize("users", [None, "5G"])
def test_each_start_has_its_own_size_unless_the_user_gave_one(
    users: str | None, tmp_path: Path
) -> None:
    found = run(1, tmp_path, start_bigger, users)[0]
    assert found == ([users] * 2 if users else [str(1024 * MiB), str(2048 * MiB)])


def use_after_the_end(group: mc.Group, library: FakeLibrary) -> None:
    memory = NvshmemMemory(group, 0)
    finalize(group)
    with pytest.raises(mc.StateError, match="NVSHMEM was finalised after this memory was opened"):
        memory.allocate(MiB)
    assert library.calls["allocate"] == 0
    group.barrier()


def test_memory_from_before_the_end_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, use_after_the_end)


def end_late(group: mc.Group, library: FakeLibrary) -> None:
    """One rank does not find that all have come."""
    with NvshmemMemory(group, 0) as memory:
        memory.allocate(64)
    library.late_s = 1.0 if group.rank == 1 else 0
    if group.rank == 1:
        with pytest.raises(mc.PeerTimeout, match="nvshmem_finalize"):
            finalize(group, 0.5)
    else:
        finalize(group, 0.5)
    state = "rank 0: new; rank 1: finalising it has failed"
    with pytest.raises(mc.TransportUnavailable, match=state):
        NvshmemMemory(group, 0)
    with pytest.raises(mc.StateError, match=state):
        finalize(group)
    assert library.calls["init"] == 1
    group.barrier()


def test_an_end_that_failed_is_the_end(tmp_path: Path) -> None:
    run(2, tmp_path, end_late)


def fill_up(group: mc.Group, library: FakeLibrary) -> str:
    with NvshmemMemory(group, 0) as memory, pytest.raises(mc.OutOfMemory) as caught:
        memory.allocate(4 * MiB)
    return str(caught.value)


def test_a_full_heap_names_the_variable_that_sizes_it(tmp_path: Path) -> None:
    for text in run(2, tmp_path, fill_up, room=2 * MiB):
        assert "NVSHMEM_SYMMETRIC_SIZE=" in text


def never_starts(group: mc.Group, library: FakeLibrary) -> str:
    with pytest.raises(mc.PeerTimeout) as caught:
        NvshmemMemory(group, 0, timeout_s=4)
    return caught.value.phase


def test_starting_is_bounded(tmp_path: Path) -> None:
    assert run(2, tmp_path, never_starts, late_s=30) == ["nvshmem_init"] * 2


def test_threads_are_refused() -> None:
    def one(group: mc.Group) -> None:
        with pytest.raises(mc.TransportUnavailable, match="a process of its own"):
            NvshmemMemory(group, 0)

    with installed(FakeDriver(GPUS)):
        run_threads(one, 2)


# ---- joined to the kernels -------------------------------------------------------------------


CFG = mc.MoeConfig(num_experts=4, top_k=2, hidden=64, max_tokens=8, timeout_s=5)


def open_comm(group: mc.Group, library: FakeLibrary, forbidden: bool) -> Any:
    if forbidden:
        os.environ["MOECOMM_NVSHMEM_NO_POINTERS"] = "1"
        os.environ["MOECOMM_NVSHMEM_CHUNK"] = str(3 + group.rank)
    for _ in range(2):
        with mc.MoeComm(CFG, group, transport="nvshmem", device="cuda:0") as comm:
            layout, run = comm.layout, comm._runtime
            words = (ctypes.c_uint64 * group.size).from_address(run.local)
            assert layout.local["peers"].offset == 0
            known = [bool(word) for word in words]
            modules = len(library.modules)
            found = layout.remote, known, modules, layout.lines
            if layout.areas is not None:
                base = run.local + layout.local["remote_base"].offset
                heaps = (ctypes.c_uint64 * group.size).from_address(base)
                assert list(map(bool, heaps)) == [True] * group.size
                assert run.remote_flags == run.symmetric + layout.symmetric.nbytes
                assert run.remote_bulk == run.remote_flags + layout.areas.flags.nbytes
                taken = run.remote_bulk + layout.areas.bulk.nbytes - run.symmetric
                assert comm.memory_bytes >= taken
        assert not library.modules
    assert library.calls["init"] == 1
    return found


@pytest.mark.archive
def test_peers_that_are_mapped_are_stored_to(tmp_path: Path) -> None:
    """The ordinary kernels, with lines: NVSHMEM is but the memory."""
    assert run(2, tmp_path, open_comm, False) == [(None, [True, True], 0, True)] * 2


@pytest.mark.archive
def test_without_pointers_kernels_put(tmp_path: Path) -> None:
    """All modules are introduced to NVSHMEM, and taken leave of; one rank's chunk holds for all."""
    for rank, found in enumerate(run(2, tmp_path, open_comm, True)):
        remote = Remote(mode="nvshmem", chunk=3)
        assert found == (remote, [rank == 0, rank == 1], len(STAGES), False)


def test_on_the_cpu_there_is_no_nvshmem() -> None:
    def one(group: mc.Group) -> None:
        with pytest.raises(mc.TransportUnavailable, match="joins GPUs"):
            mc.MoeComm(CFG, group, transport="nvshmem")

    run_threads(one, 1)


# ---- versions --------------------------------------------------------------------------------


COPY = Copy(Path("/opt/nvshmem"), (3, 4, 5))


@pytest.mark.parametrize(
    ("headers", "archive", "host"),
    [((3, 4, 5), (3, 4, 5), (3, 8, 0)), ((3, 4, 5), (3, 8, 0), (3, 4, 5)),
     ((3, 8, 0), (3, 4, 5), (3, 4, 5)), ((3, 4, 5), None, (3, 4, 5))],
)  # fmt: skip
def test_f14_one_part_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, headers: Any, archive: Any, host: Any
) -> None:
    monkeypatch.setattr(nvshmem_link, "archive_version", lambda *_: archive)
    with pytest.raises(mc.TransportUnavailable, match="must be one version") as caught:
        nvshmem_link.check_versions(Copy(COPY.root, headers), "sm_90", host, "/usr/lib/host.so.3")
    assert "/opt/nvshmem, host library" in str(caught.value)
    assert " at /usr/lib/host.so.3: must be" in str(caught.value)
    for what, version in (("headers", headers), ("archive", archive), ("host library", host)):
        text = ".".join(map(str, version)) if version else "of unknown version"
        assert f"{what} {text}" in str(caught.value)


def test_a_release_with_other_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_link, "archive_version", lambda *_: (3, 8, 0))
    with pytest.raises(mc.TransportUnavailable, match="kernels know the device functions"):
        nvshmem_link.check_versions(Copy(COPY.root, (3, 8, 0)), "sm_90", (3, 8, 0))


def test_no_copy_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvshmem_link.nvshmem_copy, "roots", lambda: [tmp_path])
    with pytest.raises(mc.TransportUnavailable, match=str(tmp_path)):
        nvshmem_link.find_copy()
