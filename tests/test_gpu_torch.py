"""torch custom ops on GPUs: the checks of ``test_torch_ops.py``, and torch's own compiler."""

from __future__ import annotations

import pytest
import torch_ranks
from payload import assert_same_bits
from torch_checks import assert_exchanged, assert_gradients
from torch_ranks import EXCHANGES, LAYERS, NUM_RANKS

import moecomm as mc

BACKENDS = ("aot_eager", "inductor")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda:0", marks=pytest.mark.gpu, id="2-on-1"),
        pytest.param(None, marks=pytest.mark.gpus(2), id="2-on-2"),
    ],
)
def test_e07_e08_exchanges_and_gradients_compiled_or_not(device: str | None) -> None:
    ranks = mc.run(torch_ranks.all_of_it, NUM_RANKS, BACKENDS, device, device="cuda", timeout_s=400)
    for rank, (exchanged, pairs, _) in enumerate(ranks):
        for name in EXCHANGES:
            for way in ("plain", *BACKENDS):
                assert_exchanged(name, rank, exchanged[name][way])
        for actual, expected in pairs:
            assert_same_bits(actual, expected, f"rank {rank}: two communicators")
    for name in LAYERS:
        expected = torch_ranks.dense_layer(name)
        for mode in ("plain", "checkpoint", "compiled", *(f"checkpoint-{b}" for b in BACKENDS)):
            found = [trained[name][mode] for _, _, trained in ranks]
            assert_gradients(name, mode, expected, found)
