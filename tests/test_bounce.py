"""A bounce on a played GPU: what goes on which stream, in which order; nothing waits for good."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, FakeGpu, installed
from fake_gpu import GpuArray
from fake_transport import network
from threads import run_threads

import moecomm as mc
from moecomm import arrays
from moecomm.kernels.gpu import GpuKernels
from moecomm.received import ReceivedViews
from moecomm.remote import Remote
from moecomm.remote_words import FREE
from moecomm.runtime.bounce import Bounce
from moecomm.runtime.streams import Streams

CFG = mc.MoeConfig(
    num_experts=4, top_k=2, hidden=64, max_tokens=8, in_flight=2, dispatch_dtype="float32",
    combine_dtype="float32", timeout_s=5,
)  # fmt: skip
MINE = 7  # the caller's stream


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr("moecomm.transport.engine.topology.pci_address_of", lambda _: "none")
    # No library makes arrays on this GPU.
    monkeypatch.setattr(arrays, "empty_like_kind", lambda *_, **__: GpuArray(np.zeros((3, 64))))
    monkeypatch.setattr(ReceivedViews, "of", lambda self, handle: None)
    with installed(FakeDriver([FakeGpu("GPU-a"), FakeGpu("GPU-b")])) as driver:
        yield driver


def on_two_nodes(work: Callable[[mc.MoeComm], Any]) -> list[Any]:
    """``work`` on rank 0, while rank 1 is there."""

    def look(group: mc.Group) -> Any:
        with mc.MoeComm(CFG, group, "fake", device="cuda") as comm:
            group.barrier()
            found = work(comm) if group.rank == 0 else None
            group.barrier()
        return found

    with network(2, 1):
        return run_threads(look, 2)


def send(comm: mc.MoeComm, stream: int = MINE) -> mc.Handle:
    x, idx = np.zeros((3, 64), np.float32), np.zeros((3, 2), np.int32)
    weights = GpuArray(np.ones((3, 2), np.float32), 0)
    return comm.dispatch_send(GpuArray(x, 0), GpuArray(idx, 0), weights, stream=stream)


def exchange(comm: mc.MoeComm, stream: int = MINE) -> None:
    handle = send(comm, stream)
    comm.dispatch_recv(handle, stream=stream)
    comm.combine_send(GpuArray(np.zeros(comm.layout.recv_shape, np.float32)), handle, stream=stream)
    comm.combine_recv(handle, stream=stream)


def named(gpus: FakeDriver, comm: mc.MoeComm) -> list[tuple[Any, ...]]:
    """What has been queued since, streams and words by name."""
    bounce = comm._runtime._launch.__self__
    streams = {MINE: "mine", bounce._out: "out", bounce._into: "into"}
    events = {bounce._sent: "sent", **{e: f"pushed {n}" for n, e in enumerate(bounce._pushed)}}
    found = []
    for what, stream, *more in gpus.queued:
        if what in ("record", "wait"):
            more = [events[more[0]]]
        elif what == "wait for":
            more[0] -= bounce._landed
        found.append((what, streams[stream], *more))
    gpus.queued.clear()
    return found


def sending(stage: str, push: str, pull: str, slot: int, half: int, number: int) -> list[Any]:
    word = 8 * (2 * slot + half)
    return [
        (stage, "mine"), ("record", "mine", "sent"),
        ("wait", "out", "sent"), (push, "out", number), ("record", "out", f"pushed {slot}"),
        ("wait", "into", "sent"), ("wait for", "into", word, number, "CU_STREAM_WAIT_VALUE_GEQ"),
        (pull, "into", number),
    ]  # fmt: skip


def receiving(pull: str, stage: str, slot: int) -> list[Any]:
    return [("wait", "mine", f"pushed {slot}"), (pull, "mine", 0), (stage, "mine")]


def test_push_and_pull_go_beside_the_callers_stream(gpus: FakeDriver) -> None:
    """Every wait of a stream is for what has been queued before it, or for the mover."""

    def work(comm: mc.MoeComm) -> None:
        for slot, number in ((0, 1), (0, 2), (1, 1)):
            if slot == 1:
                send(comm)  # takes slot 0
            gpus.queued.clear()
            exchange(comm)
            assert named(gpus, comm) == [
                *sending("dispatch_send", "dispatch_push", "dispatch_pull", slot, 0, number),
                *receiving("dispatch_pull", "dispatch_recv", slot),
                *sending("combine_send", "combine_push", "combine_pull", slot, 1, number),
                *receiving("combine_pull", "combine_recv", slot),
            ]

    on_two_nodes(work)


IN_LINE = [
    "dispatch_send", "dispatch_push", "dispatch_pull", "dispatch_recv",
    "combine_send", "combine_push", "combine_pull", "combine_recv",
]  # fmt: skip


@pytest.mark.parametrize("why", ["captured", "asked for"])
def test_in_line(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "captured":
        gpus.capturing.add(MINE)
    else:
        monkeypatch.setenv("MOECOMM_BOUNCE_IN_LINE", "1")

    def work(comm: mc.MoeComm) -> None:
        gpus.queued.clear()
        exchange(comm)
        assert named(gpus, comm) == [
            (stage, "mine", 0) if stage.endswith(("push", "pull")) else (stage, "mine")
            for stage in IN_LINE
        ]

    on_two_nodes(work)


def test_sent_eagerly_and_received_in_a_capture(gpus: FakeDriver) -> None:
    """The capture cannot wait for push, and need not."""

    def work(comm: mc.MoeComm) -> None:
        gpus.queued.clear()
        handle = send(comm)
        named(gpus, comm)
        gpus.capturing.add(MINE)
        comm.dispatch_recv(handle, stream=MINE)
        assert named(gpus, comm) == [("dispatch_pull", "mine", 0), ("dispatch_recv", "mine")]
        gpus.capturing.clear()

    on_two_nodes(work)


def test_where_streams_cannot_wait_for_words_only_push_goes_beside(gpus: FakeDriver) -> None:
    for gpu in gpus.gpus:
        gpu.attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"] = 0

    def work(comm: mc.MoeComm) -> None:
        gpus.queued.clear()
        send(comm)
        found = named(gpus, comm)
        assert ("dispatch_push", "out", 1) in found
        assert {stream for _, stream, *_ in found} == {"mine", "out"}

    on_two_nodes(work)


def test_what_starts_early_keeps_nobody_from_room(gpus: FakeDriver) -> None:
    """Not sending stages, which wait for peers; nor push, which those wait for; nor pull beside."""
    for gpu in gpus.gpus:
        gpu.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9
    on_two_nodes(exchange)
    assert gpus.started_early == {
        (stage, MINE) for stage in IN_LINE if stage.endswith(("_recv", "_pull"))
    }


def test_another_device_may_be_current(gpus: FakeDriver) -> None:
    def work(comm: mc.MoeComm) -> None:
        gpus.cuCtxSetCurrent(gpus.real.CUcontext(1001))
        gpus.home = 1000
        gpus.queued.clear()
        exchange(comm, stream=0)
        assert [what for what, stream, *_ in gpus.queued if stream == 0] == [
            "dispatch_send", "record", "wait", "dispatch_pull", "dispatch_recv",
            "combine_send", "record", "wait", "combine_pull", "combine_recv",
        ]  # fmt: skip
        assert int(gpus.cuCtxGetCurrent()[1]) == 1001

    on_two_nodes(work)


def test_what_fails_half_made_gives_everything_back(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = mc.Layout(CFG, 2, 0, Remote(mode="proxied", bounce=True))
    kernels = GpuKernels(layout, 0)
    streams = Streams(0)
    before = dict(gpus.live)
    for name in ("cuStreamCreateWithPriority", "cuEventCreate"):
        plain = getattr(gpus, name)
        for succeed in range(3):
            left = iter([True] * succeed)
            monkeypatch.setattr(
                gpus, name, lambda *a, p=plain, i=left: p(*a) if next(i, False) else gpus._refuse()
            )
            if name == "cuEventCreate" or succeed < 2:
                with pytest.raises(mc.MoecommError):
                    Bounce(0, layout, kernels, streams, 0)
        monkeypatch.setattr(gpus, name, plain)
    assert dict(+gpus.live) == +Counter(before)
    made = [Bounce(0, layout, kernels, streams, 0) for _ in range(5)]
    assert [bool(bounce._into) for bounce in made] == [True] * 4 + [False]
    for bounce in made:
        bounce.close()


@pytest.mark.parametrize(("connections", "most"), [("", 4), ("4", 2), ("1", 0), ("32", 4)])
def test_few_communicators_of_a_process_have_a_stream_that_waits(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch, connections: str, most: int
) -> None:
    """Those that come later pull in line; leave is given back."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    layout = mc.Layout(CFG, 2, 0, Remote(mode="proxied", bounce=True))
    streams = Streams(0)

    def make() -> Bounce:
        return Bounce(0, layout, kernels, streams, 0)

    kernels = GpuKernels(layout, 0)
    made = [make() for _ in range(6)]
    assert [bool(bounce._into) for bounce in made] == [n < most for n in range(6)]
    for bounce in made:
        bounce.close()
        bounce.close()
    again = [make() for _ in range(6)]
    assert sum(bool(bounce._into) for bounce in again) == most
    for bounce in again:
        bounce.close()


def test_closing_frees_streams_before_it_waits_for_them(gpus: FakeDriver) -> None:
    """A handle that was sent and never received: its pull waits for what may never come."""
    seen: list[list[int]] = []

    def work(comm: mc.MoeComm) -> None:
        send(comm)
        landed = comm._runtime._launch.__self__._landed
        words = (ctypes.c_int64 * 4).from_address(landed)
        plain = gpus.cuCtxSynchronize

        def synchronize() -> Any:
            seen.append(list(words))
            return plain()

        gpus.cuCtxSynchronize = synchronize  # type: ignore[method-assign]
        assert list(words) == [0] * 4
        comm.close()
        gpus.cuCtxSynchronize = plain  # type: ignore[method-assign]

    on_two_nodes(work)
    assert seen[0] == [FREE] * 4


def test_closing_gives_everything_back_at_once(gpus: FakeDriver) -> None:
    """Not when the garbage collector next comes by."""
    gc.collect()
    gc.disable()
    try:
        on_two_nodes(exchange)
        assert not +gpus.live, gpus.live
    finally:
        gc.enable()


def test_streams_are_freed_when_the_process_ends(gpus: FakeDriver) -> None:
    def work(comm: mc.MoeComm) -> None:
        send(comm)
        landed = comm._runtime._launch.__self__._landed
        words = (ctypes.c_int64 * 4).from_address(landed)
        wake = comm._runtime._wake
        assert wake.alive
        assert wake.atexit
        assert list(words) == [0] * 4
        wake()  # as the interpreter does then
        assert list(words) == [FREE] * 4

    on_two_nodes(work)
