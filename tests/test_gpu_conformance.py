"""Memory that GPUs share, by the suite that every transport's memory must pass."""

from __future__ import annotations

from typing import Any

import pytest
import transport_conformance as conformance

import moecomm as mc
from moecomm.transport import open_gpu_memory

ALONE = "unequal_sizes_are_refused_on_all_ranks"  # one rank has nobody to differ from


def conform(group: mc.Group, transport: str, index: int | None) -> None:
    """Every check, on memory opened for it."""
    conformance.GPU = group.rank if index is None else index
    for name in conformance.MEMORY_CHECKS:
        if group.size == 1 and name == ALONE:
            continue
        try:
            conformance.run_check(group, _opener(transport), name)
        except Exception as error:
            error.add_note(f"in the conformance check {name}")
            raise


def _opener(transport: str) -> Any:
    return lambda group: open_gpu_memory(transport, group, conformance.GPU)


@pytest.mark.parametrize(
    ("num_ranks", "index"),
    [
        pytest.param(1, 0, marks=pytest.mark.gpu, id="1"),
        pytest.param(3, 0, marks=pytest.mark.gpu, id="3-on-1"),
        pytest.param(2, None, marks=pytest.mark.gpus(2), id="2-on-2"),
    ],
)
def test_nvlink(num_ranks: int, index: int | None) -> None:
    mc.run(conform, num_ranks, "nvlink", index, device="cuda", timeout_s=120)


@pytest.mark.gpus(2)
@pytest.mark.archive
@pytest.mark.parametrize("without_pointers", [False, True], ids=["stores", "puts"])
def test_nvshmem(without_pointers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pointers the suite sees a rank's own memory alone."""
    monkeypatch.setenv("MOECOMM_NVSHMEM_NO_POINTERS", str(int(without_pointers)))
    mc.run(conform, 2, "nvshmem", None, device="cuda", timeout_s=120)
