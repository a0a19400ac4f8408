"""Four and eight ranks with a GPU each; what ``bench/ep8.sh`` runs before it measures.

``MOECOMM_TEST_SHARED_GPUS=1`` lets them share two GPUs: the same work, for its correctness alone.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import gpu_ranks
import gpu_suite
import pytest
from test_gpu_nvlink import CONFIGS, SHORT

import moecomm as mc
from moecomm.bench.prepare import compile_ahead
from moecomm.run import outcomes

pytestmark = pytest.mark.usefixtures("compiled")
SHARED = os.environ.get("MOECOMM_TEST_SHARED_GPUS") == "1"
SIZES = [
    pytest.param(ranks, marks=pytest.mark.gpus(2 if SHARED else ranks), id=f"{ranks}-ranks")
    for ranks in (4, 8)
]


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels, side by side: ranks would wait for each other's, one by one."""
    configs = [*(cfg for cfg, _ in CONFIGS), SHORT]
    compile_ahead(mc.Layout(cfg, ranks, 0) for cfg in configs for ranks in (4, 8))


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("transport", ["nvlink", "nvshmem"])
def test_everything(transport: str, num_ranks: int) -> None:
    try:
        done = mc.run(
            gpu_suite.everything, num_ranks, CONFIGS,
            device="cuda", transport=transport, timeout_s=200,
        )  # fmt: skip
    except mc.TransportUnavailable as error:
        if os.environ.get("MOECOMM_TEST_STRICT") == "1":
            raise
        pytest.skip(str(error))
    assert done == [done[0]] * num_ranks
    assert len(done[0]) == 7


@pytest.mark.parametrize("num_ranks", SIZES)
def test_c02_a_killed_peer_is_named_by_all_others_nvlink(num_ranks: int) -> None:
    device: Any = None
    ends = outcomes(
        gpu_ranks.die_or_survive, num_ranks, SHORT, device, device="cuda", timeout_s=120
    )
    assert ends[1].exit_code == -signal.SIGKILL
    for end in (*ends[:1], *ends[2:]):
        assert end.error is None, end.error
        phase, peer, _ = end.value
        assert (peer, phase in ("dispatch_send", "dispatch_recv", "combine_recv")) == (1, True)
