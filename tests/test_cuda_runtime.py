"""MoeComm on a played GPU: devices, loading, launches, streams, and who learns of a failure.

The kernels are compiled for real; what they compute is in test_gpu_direct.py and
test_gpu_nvlink.py.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import GRANULARITY, FakeDriver, FakeGpu, installed
from fake_gpu import GpuArray
from fake_transport import network
from threads import run_threads

import moecomm as mc
from moecomm import arrays
from moecomm.kernels.args import ArgBlock, Args
from moecomm.kernels.gpu import GpuKernels
from moecomm.kernels.stages import STAGES, input_codes
from moecomm.runtime import cuda as cuda_runtime
from moecomm.runtime import devices
from moecomm.runtime.streams import Streams

CFG = mc.MoeConfig(
    num_experts=4, top_k=2, hidden=64, max_tokens=8, dispatch_dtype="float32", timeout_s=5
)


@pytest.fixture
def gpus() -> Iterator[FakeDriver]:
    with installed(FakeDriver([FakeGpu("GPU-a"), FakeGpu("GPU-b")])) as driver:
        yield driver


def inputs(num_tokens: int = 3, index: int = 0) -> tuple[GpuArray, GpuArray, GpuArray]:
    return (
        GpuArray(np.zeros((num_tokens, 64), np.float32), index),
        GpuArray(np.zeros((num_tokens, 2), np.int32), index),
        GpuArray(np.ones((num_tokens, 2), np.float32), index),
    )


def in_threads(work: Any, num_ranks: int = 1, **options: Any) -> list[Any]:
    def one(group: mc.Group) -> Any:
        with mc.MoeComm(CFG, group, **{"device": "cuda", **options}) as comm:
            return work(comm)

    return run_threads(one, num_ranks)


# ---- construction and end ----------------------------------------------------------------


def test_everything_is_taken_at_construction_and_given_back(gpus: FakeDriver) -> None:
    def look(comm: mc.MoeComm) -> int:
        assert comm.device == ("cuda", 0)
        comm.group.barrier()
        held = sum((1 << 30) - gpu.free for gpu in gpus.gpus)
        comm.group.barrier()
        assert comm.memory_bytes % GRANULARITY == 0
        return held - comm.memory_bytes * comm.group.size

    assert in_threads(look, 2) == [0, 0]
    gc.collect()
    assert not +gpus.live, gpus.live
    loaded = [entry[1] for entry in gpus.log if entry[0] == "load"]
    assert len(loaded) == 2 * len(STAGES)
    assert {entry[1] for entry in gpus.log if entry[0] == "context"} == {0}  # none on others
    assert not gpus.launches


def test_a_constructor_that_fails_behind_the_runtime_gives_all_back(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no views today")

    monkeypatch.setattr("moecomm.comm.ReceivedViews", broken)
    with pytest.raises(RuntimeError, match="no views today"):
        in_threads(lambda comm: None)
    gc.collect()
    assert not +gpus.live, gpus.live


def test_kernels_may_use_more_shared_memory_than_the_default(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecomm.kernels.gpu.shared_bytes", lambda *_: 60_000)
    in_threads(lambda comm: None)
    asked = {entry[1:] for entry in gpus.log if entry[0] == "attribute"}
    assert len(asked) == len(STAGES)
    name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert {(what, value) for _, what, value in asked} == {(name, 60_000)}


@pytest.mark.parametrize("shared", [True, False])
def test_sending_halves_start_early_only_where_a_rank_has_a_gpu_of_its_own(
    gpus: FakeDriver, shared: bool
) -> None:
    for gpu in gpus.gpus:
        gpu.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9

    layout = mc.Layout(CFG, 2, 0)
    kernels = GpuKernels(layout, 0, shared=shared)
    for stage in STAGES:
        code = input_codes(CFG)[0] if stage == "dispatch_send" else 0
        kernels.launch(stage, ArgBlock(Args()), 1, code, 0)
    kernels.close()
    early = {name.removesuffix("_lines") for name, _ in gpus.started_early}
    receiving = {"dispatch_recv", "combine_recv"}
    assert early == (receiving if shared else set(STAGES))


def test_a_launch_takes_the_kernel_of_its_input_and_the_shape_of_its_size(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing of what launches take is kept for long."""
    monkeypatch.setattr("moecomm.kernels.gpu.MAX_READY", 3)
    found = gpus.cuModuleGetFunction
    monkeypatch.setattr(gpus, "cuModuleGetFunction", lambda module, name: found(module, module))
    layout = mc.Layout(dataclasses.replace(CFG, dispatch_dtype="float8_e4m3fn"), 1, 0)
    kernels = GpuKernels(layout, 0)
    codes = input_codes(layout.cfg)
    for code, size, stream in itertools.product(codes, (1, 8), (0, 40)):
        for _ in range(2):
            kernels.launch("dispatch_send", ArgBlock(Args()), size, code, stream)
    kernels.close()
    first, second = gpus.launches[::2], gpus.launches[1::2]
    assert [launch[:4] for launch in first] == [launch[:4] for launch in second]
    assert [launch[3] for launch in first] == [0, 40] * 2 * len(codes)
    kernel = dict.fromkeys(launch[0] for launch in first)
    assert [launch[0] for launch in first] == [name for name in kernel for _ in range(4)]
    assert len(kernel) == len(codes) > 1


def test_one_rank_that_fails_to_load_is_everybodys_error(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(GpuKernels):
        def __init__(self, layout: Any, index: int, link: Any, *, shared: bool) -> None:
            super().__init__(layout, index, link, shared=shared)
            if layout.rank == 1:
                self.close()
                raise mc.CompileError("no such instruction")

    monkeypatch.setattr(cuda_runtime, "GpuKernels", Broken)

    def fail(group: mc.Group) -> Exception:
        with pytest.raises(mc.MoecommError) as caught:
            mc.MoeComm(CFG, group, device="cuda")
        return caught.value

    errors = run_threads(fail, 3)
    assert isinstance(errors[1], mc.CompileError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, mc.TransportError)
        assert "rank 1 failed in load: CompileError: no such instruction" in str(error)
        assert error.peer == 1
    del errors, error
    gc.collect()
    assert not +gpus.live, gpus.live


def test_ranks_on_different_kinds_of_device_are_refused(gpus: FakeDriver) -> None:
    def fail(group: mc.Group) -> str:
        with pytest.raises(mc.ConfigError) as caught:
            mc.MoeComm(CFG, group, device=["cpu", "cuda"][group.rank])
        return str(caught.value)

    assert (
        run_threads(fail, 2)
        == ["device differs between ranks: 'cpu' on rank 0; 'cuda' on rank 1"] * 2
    )


def test_poison_fills_what_means_nothing_yet(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECOMM_POISON", "1")

    def look(comm: mc.MoeComm) -> None:
        assert set(comm._runtime.read_words("x")) == {0x7F7F7F7F7F7F7F7F}
        assert set(comm._runtime.read_words("epoch")) == {0}
        assert comm._runtime.read_words("peers") == [comm._runtime.symmetric]

    in_threads(look)


# ---- which device ------------------------------------------------------------------------


def choose(monkeypatch: pytest.MonkeyPatch, num_ranks: int, **variables: str) -> list[int]:
    for name in ("MOECOMM_LOCAL_RANK", *devices.LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return run_threads(lambda g: devices.choose_index(g, None, 5.0), num_ranks)


def apart(monkeypatch: pytest.MonkeyPatch, ranks_per_machine: int) -> None:
    """Let ranks look like processes, some of them on one machine."""
    names = iter(range(100))
    monkeypatch.setattr(devices, "process", lambda: f"process {next(names)}")
    monkeypatch.setattr(devices, "machine", lambda: "here")


def test_threads_use_the_current_device(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 2, LOCAL_RANK="1") == [0, 0]

    def on_the_other(group: mc.Group) -> int:
        gpus.cuCtxSetCurrent(gpus.real.CUcontext(1001))
        return devices.choose_index(group, None, 5.0)

    assert run_threads(on_the_other, 2) == [1, 1]
    assert run_threads(lambda g: devices.choose_index(g, 1, 5.0), 2) == [1, 1]


def test_processes_share_gpus_in_turn(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, 5)
    assert choose(monkeypatch, 5) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("variable", ["MOECOMM_LOCAL_RANK", *devices.LAUNCHERS])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_launchers_say_the_local_rank(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch, variable: str, num_ranks: int
) -> None:
    apart(monkeypatch, 2)
    assert choose(monkeypatch, num_ranks, **{variable: "3"}) == [1] * num_ranks


def test_without_a_gpu_all_ranks_say_so() -> None:
    def fail(group: mc.Group) -> str:
        with pytest.raises(mc.MoecommError) as caught:
            mc.MoeComm(CFG, group, device="cuda")
        return str(caught.value)

    with installed(FakeDriver([])):
        for message in run_threads(fail, 2):
            assert "this process sees no GPU" in message


# ---- launches and streams ------------------------------------------------------------------


def test_a_launch_is_what_the_half_means(gpus: FakeDriver) -> None:
    x, idx, weights = inputs()

    def send(comm: mc.MoeComm) -> None:
        handle = comm.dispatch_send(x, idx, weights, stream=77)
        function, shape, _, stream, address = gpus.launches[-1]
        assert function.startswith("dispatch_send")
        assert shape[1:3] == (1, 1)
        assert stream == 77
        args = Args.from_address(address)
        assert (args.slot, args.max_rows, args.x) == (0, 3, x.array.ctypes.data)
        assert args.topk_weights == weights.array.ctypes.data
        other = comm.dispatch_send(x, idx, None, stream=77)
        args = Args.from_address(gpus.launches[-1][-1])
        assert (args.slot, args.topk_weights, args.topk_weights_stride) == (1, 0, 0)
        for one in (handle, other):
            one.close()

    in_threads(send)


def test_e06_every_launch_is_on_the_stream_that_was_given(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has another one current, and knows nothing of this one."""
    import torch

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 40, raising=False)
    x, idx, weights = inputs()

    def new_array(*_: Any, stream: int | None = None) -> GpuArray:
        assert stream == 77  # what it is for, too
        return x

    def all_halves(group: mc.Group) -> None:
        comm = mc.MoeComm(dataclasses.replace(CFG, combine_dtype="float32"), group, device="cuda")
        comm._views.of = lambda handle: None  # type: ignore[method-assign, assignment]
        gpus.launches.clear()
        for received in (False, True):
            handle = comm.dispatch_send(x, idx, weights, stream=77)
            if received:
                comm.dispatch_recv(handle, stream=77)
            handle.close(stream=77)
        handle = comm.dispatch_send(x, idx, weights, stream=77)
        comm.dispatch_recv(handle, stream=77)
        y = GpuArray(np.zeros(comm.layout.recv_shape, np.float32))
        comm.combine_send(y, handle, stream=77)
        monkeypatch.setattr(arrays, "empty_like_kind", new_array)
        assert comm.combine_recv(handle, weights, stream=77) is x
        assert {function.split("_lines")[0] for function, *_ in gpus.launches} == set(STAGES)
        assert {launch[3] for launch in gpus.launches} == {77}
        comm.close()

    run_threads(all_halves, 1)


@pytest.mark.parametrize("stream", [0, 2, 5])
def test_the_callers_device_stays_current_and_the_right_one_is_used(
    gpus: FakeDriver, stream: int
) -> None:
    def send(comm: mc.MoeComm) -> None:
        gpus.home = 1001
        for current in (1000, 1001, 0):
            if current:
                gpus.cuCtxSetCurrent(gpus.real.CUcontext(current))
            else:
                gpus.cuCtxPopCurrent()
            gpus.log.clear()
            comm.dispatch_send(*inputs(index=1), stream=stream).close(stream=9)
            assert waits(gpus)[-2:] == [("record", stream), ("wait", 9)]
            assert int(gpus.cuCtxGetCurrent()[1]) == current

    in_threads(send, device="cuda:1")
    assert [launch[0].context for launch in gpus.launches] == [1001] * 9


def test_a_launch_that_fails_in_the_right_context_too_is_an_error(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = (gpus.real.CUresult.CUDA_ERROR_INVALID_HANDLE,)
    monkeypatch.setattr(gpus, "cuLaunchKernelEx", lambda *_: refused)
    kernels = GpuKernels(mc.Layout(CFG, 1, 0), 0)
    with pytest.raises(mc.MoecommError, match="launching release failed: .*INVALID_HANDLE"):
        kernels.launch("release", ArgBlock(Args()), 0, 0, 0)
    kernels.close()


def waits(gpus: FakeDriver) -> list[tuple[Any, ...]]:
    found = [entry for entry in gpus.log if entry[0] in ("record", "wait")]
    gpus.log.clear()
    return found


def test_c04_halves_on_different_streams_wait_for_each_other(gpus: FakeDriver) -> None:
    def work(comm: mc.MoeComm) -> None:
        a = comm.dispatch_send(*inputs(), stream=10)
        b = comm.dispatch_send(*inputs(), stream=10)
        assert waits(gpus) == []
        comm.dispatch_recv(a, stream=20)
        assert waits(gpus) == [("record", 10), ("wait", 20)]
        comm.dispatch_recv(b, stream=20)
        assert waits(gpus) == []

    def without_views(comm: mc.MoeComm) -> None:
        comm._views.of = lambda handle: None  # type: ignore[method-assign, assignment]
        work(comm)

    in_threads(without_views)


def test_captures_are_left_alone(gpus: FakeDriver) -> None:
    streams = Streams(0)
    streams.enter(10)
    gpus.capturing.add(30)
    streams.enter(30)  # captured: no event, and not what the next eager half waits for
    streams.enter(10)
    assert waits(gpus) == []
    streams.enter(20)
    assert waits(gpus) == [("record", 10), ("wait", 20)]
    gpus.capturing.add(20)
    streams.enter(10)  # what is being captured cannot be waited for
    assert waits(gpus) == []
    streams.close()
    streams.close()
    assert not gpus.live["event"]


def test_a_stream_that_cannot_be_asked_counts_as_captured(gpus: FakeDriver) -> None:
    streams = Streams(0)
    streams.enter(10)
    refused = (gpus.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,)
    gpus.cuStreamIsCapturing = lambda stream: refused  # type: ignore[method-assign]
    streams.enter(0)
    assert waits(gpus) == []
    streams.close()


def test_the_stream_object_lives_until_another_is_used(gpus: FakeDriver) -> None:
    class Stream:
        ptr = 10

    def work(comm: mc.MoeComm) -> None:
        import weakref

        stream = Stream()
        gone = weakref.ref(stream)
        handle = comm.dispatch_send(*inputs(), stream=stream)
        del stream
        gc.collect()
        assert gone() is not None
        comm.dispatch_send(*inputs(), stream=20)
        gc.collect()
        assert gone() is None
        handle.close()

    in_threads(work)


def test_streams_are_what_libraries_call_them(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    streams = Streams(0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 40 + i, raising=False)
    assert streams.find(None, "torch") == 40
    assert streams.find(None, "numpy") == 0
    assert streams.find(1, "torch") == streams.find(0, "torch") == 0  # both: the legacy stream

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 99

    assert streams.find(Protocol(), "torch") == 99
    with pytest.raises(mc.DtypeError, match="stream='s': must be"):
        streams.find("s", "torch")
    streams.close()


def test_a_producers_stream_comes_first(gpus: FakeDriver) -> None:  # G07
    class Interface(GpuArray):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {
                "version": 3,
                "shape": self.array.shape,
                "typestr": self.array.dtype.str,
                "data": (self.array.ctypes.data, False),
                "stream": 50,
            }

    def work(comm: mc.MoeComm) -> None:
        x, idx, _ = inputs()
        comm.dispatch_send(Interface(x.array), idx, stream=60).close()

    from moecomm import array_view

    before = array_view._cuda_device_of
    array_view._cuda_device_of = lambda pointer: 0
    try:
        in_threads(work)
    finally:
        array_view._cuda_device_of = before
    assert waits(gpus)[:2] == [("record", 50), ("wait", 60)]


def test_a_failed_launch_names_the_stage(gpus: FakeDriver) -> None:
    def work(comm: mc.MoeComm) -> str:
        gpus_error = (gpus.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        comm._runtime._kernels._launch = lambda *_: gpus_error  # type: ignore[attr-defined]
        with pytest.raises(mc.MoecommError) as caught:
            comm.dispatch_send(*inputs(), stream=1)
        return str(caught.value)

    (message,) = in_threads(work)
    assert "launching dispatch_send failed: CUDA_ERROR_INVALID_HANDLE" in message


def test_run_tells_ranks_their_number_on_the_machine() -> None:
    assert mc.run(_local_rank, 3) == ["0", "1", "2"]


def _local_rank(group: mc.Group) -> str:
    return os.environ["MOECOMM_LOCAL_RANK"]


# ---- several nodes -------------------------------------------------------------------------


def test_ranks_of_other_nodes_are_served_through_pinned_memory(
    gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pointer to them, areas in memory of the host, a mover; all of it given back."""
    monkeypatch.setattr("moecomm.transport.engine.topology.pci_address_of", lambda _: "none")

    def look(group: mc.Group) -> None:
        with mc.MoeComm(CFG, group, "fake", device="cuda") as comm:
            run = comm._runtime
            areas = comm.layout.areas
            assert areas is not None
            assert not comm.layout.lines
            flags, bulk = run._pinned
            assert (run.remote_flags, run.network_bulk) == (flags.address, bulk.address)
            assert run.remote_bulk == run._image.address
            pointers = [run._memory.peer_pointer(rank, run._region) for rank in range(2)]
            assert [p is not None for p in pointers] == [group.rank == 0, group.rank == 1]
            group.barrier()
            held = sum((1 << 30) - gpu.free for gpu in gpus.gpus)
            assert held == 2 * comm.memory_bytes  # the image, too
            group.barrier()
        assert run._mover.stopped

    with network(2, 1):
        run_threads(look, 2)
    gc.collect()
    assert not +gpus.live, gpus.live
