"""What is made once per slot is what would be made for every call."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

import moecomm as mc
from moecomm.handle import Handle, Received
from moecomm.received import ReceivedViews
from moecomm.runtime.base import Runtime

BASE = mc.MoeConfig(num_experts=4, top_k=2, hidden=64, max_tokens=8)
CONFIGS = {
    "batched": BASE,
    "rank": dataclasses.replace(BASE, layout="rank"),
    "scales": dataclasses.replace(BASE, dispatch_dtype="float8_e4m3fn", scale_block=16),
}


def described(received: Received) -> dict[str, Any]:
    """Where each array lies, and as what."""
    arrays = {
        field.name: getattr(received, field.name)
        for field in dataclasses.fields(received)
        if field.name != "handle"
    }
    return {
        name: None if array is None else (array.data_ptr(), array.shape, array.dtype)
        for name, array in arrays.items()
    }


@pytest.mark.parametrize("weights_given", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_kept_views_are_those_made_anew(name: str, weights_given: bool) -> None:
    layout = mc.Layout(CONFIGS[name], 2, 0)
    memory = ctypes.create_string_buffer(layout.local.nbytes + 256)
    local = -(-ctypes.addressof(memory) // 256) * 256

    def views(synchronous: bool) -> ReceivedViews:
        run = SimpleNamespace(local=local, owner=memory, device="cpu", synchronous=synchronous)
        return ReceivedViews(layout, cast(Runtime, run))

    kept, anew = views(False), views(True)
    for serial, slot in enumerate([0, 1, 0, 1]):
        handle = Handle(cast(mc.MoeComm, None), slot, serial, 3, "torch", weights_given)
        received = kept.of(handle)
        assert received.handle is handle
        assert described(received) == described(anew.of(handle))
        received.x.requires_grad_()  # the caller's own: the next one's has no gradient
        assert kept.of(handle).x.requires_grad is False
