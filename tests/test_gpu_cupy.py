"""CuPy arrays, and arrays behind the exchange protocols, on a GPU; ranks are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange import Case, make_case, used_rows
from payload import assert_same_bits
from threads import run_threads

import moecomm as mc

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "num_experts": 32,
    "top_k": 4,
    "hidden": 512,
    "max_tokens": 64,
    "num_sms": 16,
}
CONFIGS = {
    "fp16": mc.MoeConfig(**BASE, dispatch_dtype="float16", combine_dtype="float16"),
    "fp32": mc.MoeConfig(**BASE, dispatch_dtype="float32", combine_dtype="float32"),
    "bf16": mc.MoeConfig(**BASE),
    "fp8": mc.MoeConfig(
        **BASE, dispatch_dtype="float8_e4m3fn", scale_block=128, combine_dtype="float16"
    ),
}


class DlpackOnly:
    """An array of which nothing is known but how to exchange it."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class InterfaceOnly:
    """The same, by ``__cuda_array_interface__``."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__


WRAPPERS = {"cupy": lambda a: a, "dlpack": DlpackOnly, "interface": InterfaceOnly}


@pytest.mark.parametrize("name", CONFIGS)
def test_cupy_arrays_in_and_out(name: str) -> None:
    cfg = CONFIGS[name]
    case = make_case(cfg, 2, 3)
    run_threads(_exchange, 2, case, "cupy", device="cuda:0")


@pytest.mark.parametrize("wrapper", ["dlpack", "interface"])
@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_arrays_behind_a_protocol(name: str, wrapper: str) -> None:
    case = make_case(CONFIGS[name], 2, 4)
    run_threads(_exchange, 2, case, wrapper, device="cuda:0")


def _exchange(group: mc.Group, case: Case, wrapper: str) -> None:
    import cupy

    rank, wrap = group.rank, WRAPPERS[wrapper]
    # Each thread's own stream: halves must follow CuPy's current one, or ranks block each other.
    with mc.MoeComm(case.cfg, group) as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        x, idx, weights = (_there(a[rank]) for a in (case.xs, case.idxs, case.weights))
        y = _there(case.ys[rank])
        scale = None if case.x_scales is None else _there(case.x_scales[rank])
        for _ in range(5):
            handle = comm.dispatch_send(
                wrap(x), wrap(idx), None, None if scale is None else wrap(scale)
            )
            recv = comm.dispatch_recv(handle)
            comm.combine_send(wrap(y), handle)
            out = comm.combine_recv(handle, wrap(weights))
            stream.synchronize()
            comm.check()
            assert isinstance(recv.x, cupy.ndarray)
            assert isinstance(out, cupy.ndarray)
            used = used_rows(case, rank)
            assert_same_bits(_here(recv.x)[used], _words(case.recv[rank].x[used]), "x")
            assert_same_bits(_here(recv.counts), _words(case.recv[rank].counts), "counts")
            assert_same_bits(_here(out), _words(case.outs[rank]), "out")
            # Copies now and then wait for the whole GPU, so for the other rank's kernels: they must
            # not wait for ours yet. (Ranks that are processes do not know this.)
            group.barrier(30)


def _there(array: np.ndarray[Any, Any]) -> Any:
    """On the GPU; CuPy has no fp8, so that travels as bytes."""
    import cupy

    fp8 = array.dtype.name == "float8_e4m3fn"
    return cupy.asarray(array.view(np.uint8) if fp8 else array)


def _here(array: Any) -> np.ndarray[Any, Any]:
    return _words(array.get())


def _words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
