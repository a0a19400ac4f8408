"""A machine's state that went wrong elsewhere; see docs/reports.md, rows F."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace

import pytest
from fake_cuda import GRANULARITY, FakeDriver, FakeGpu, installed
from threads import run_threads

import moecomm as mc
from moecomm import cuda_driver
from moecomm.transport.nvlink import NvlinkMemory


class _Status(enum.IntEnum):
    CUDA_ERROR_SYSTEM_NOT_READY = 802


def test_f15_an_nvlink_fabric_that_is_not_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuInit(flags: int) -> tuple[_Status]:
        return (_Status.CUDA_ERROR_SYSTEM_NOT_READY,)

    monkeypatch.setattr(cuda_driver, "MODULE", "sick_driver")
    monkeypatch.setitem(sys.modules, "sick_driver", SimpleNamespace(cuInit=cuInit))
    with pytest.raises(mc.TransportUnavailable, match="the NVLink fabric is not up; start nvidia-"):
        cuda_driver.driver.__wrapped__()


def test_f15_nothing_larger_is_mapped_than_was_asked_for() -> None:
    """Own memory and a peer's, whatever the driver says of the fabric."""
    asked: list[int] = []
    with installed(FakeDriver([FakeGpu("GPU-a"), FakeGpu("GPU-b")])) as driver:
        reserve = driver.cuMemAddressReserve

        def cuMemAddressReserve(nbytes: int, *rest: int) -> object:
            asked.append(nbytes)
            return reserve(nbytes, *rest)

        driver.cuMemAddressReserve = cuMemAddressReserve  # type: ignore[assignment]

        def allocate(group: mc.Group) -> None:
            with NvlinkMemory(group, group.rank) as memory:
                memory.allocate(2 * GRANULARITY + 1)
                group.barrier()

        run_threads(allocate, 2)
    assert asked == [3 * GRANULARITY] * 4
