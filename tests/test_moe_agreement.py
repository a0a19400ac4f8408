"""All ranks must mean the same exchange: whatever differs is an error on every one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from threads import run_threads

import moecomm as mc

BASE: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 8, "timeout_s": 20.0,
    "dispatch_dtype": "float8_e4m3fn", "scale_block": 32, "layout": "grouped",
}  # fmt: skip
OTHER: dict[str, Any] = {
    "num_experts": 9,
    "top_k": 3,
    "hidden": 65,
    "max_tokens": 16,
    "dispatch_dtype": "bfloat16",
    "scale_block": 64,
    "scale_pow2": True,
    "combine_dtype": "float16",
    "layout": "batched",
    "expert_alignment": 16,
    "max_recv_tokens": 100,
    "replicas": 2,  # which 3 ranks cannot have: still everybody's error
    "reduce": "sender",
    "in_flight": 3,
    "timeout_s": 19.0,
    "wire": "flags",
    "check_values": False,
    "num_sms": 7,
    "codec": mc.codecs.fp8(32),
    "decode_to": "float32",
}
NO_FP8: dict[str, Any] = {**BASE, "dispatch_dtype": "bfloat16", "scale_block": None}
BASES: dict[str, dict[str, Any]] = {
    "dispatch_dtype": {**BASE, "scale_block": None},
    "codec": {**NO_FP8, "codec": mc.codecs.fp8(16)},
    "decode_to": {**NO_FP8, "codec": mc.codecs.fp8(16)},
}
ODD = 1  # the rank that wants something else


def test_every_field_is_tried() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(mc.MoeConfig)}


@pytest.mark.parametrize("field", OTHER)
def test_a16_a_field_that_differs_is_named_on_every_rank(field: str) -> None:
    base = BASES.get(field, BASE)
    mine, other = mc.MoeConfig(**base), mc.MoeConfig(**{**base, field: OTHER[field]})
    errors = run_threads(_refused, 3, mine, other, {}, {})
    here, there = getattr(mine, field), OTHER[field]
    if field == "codec":
        here, there = str(here), str(there)  # with a hash of their functions
    for error in errors:
        assert (
            error == f"{field} differs between ranks: {here!r} on ranks 0, 2; {there!r} on rank 1"
        )


@pytest.mark.parametrize(
    ("argument", "here", "there"),
    [("kernels", "auto", "numba"), ("transport", "auto", "loopback"), ("kernels", "cuda", "none")],
)
def test_a16_arguments_of_the_constructor_too(argument: str, here: str, there: str) -> None:
    cfg = mc.MoeConfig(**BASE)
    errors = run_threads(_refused, 3, cfg, cfg, {argument: here}, {argument: there})
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"{argument} differs between ranks: ")


def test_a16_the_first_of_several_fields() -> None:
    mine = mc.MoeConfig(**BASE)
    other = mc.MoeConfig(**{**BASE, "in_flight": 3, "hidden": 96})
    assert {error.split()[0] for error in run_threads(_refused, 3, mine, other, {}, {})} == {
        "hidden"
    }


def test_a16_processes_agree_and_go_on() -> None:
    """An error is no end: the same group serves the next communicator."""
    errors = mc.run(_then_fine, 2, timeout_s=60)
    assert errors == ["max_tokens differs between ranks: 8 on rank 0; 16 on rank 1"] * 2


def test_auto_kernels_are_the_cuda_ones() -> None:
    cfg = mc.MoeConfig(**BASE)
    run_threads(_made, 2, cfg, {"kernels": "auto"}, {"kernels": "cuda"})


def test_the_transport_of_the_group_is_used() -> None:
    (message,) = run_threads(_with_group_transport, 1)
    assert message.startswith("transport='nvlink' joins GPUs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device='tpu': must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cpu:1"}, "device='cpu:1': must be"),
        ({"kernels": "hip"}, "kernels='hip': must be 'auto', 'cuda', 'numba', or the path"),
        ({"transport": "pigeon"}, "transport='pigeon': must be one of 'auto', 'loopback'"),
    ],
)
def test_unknown_names_are_refused(arguments: dict[str, str], message: str) -> None:
    cfg = mc.MoeConfig(**BASE)
    for error in run_threads(_refused, 2, cfg, cfg, arguments, arguments):
        assert message in error


@pytest.mark.parametrize("arguments", [{"transport": "nvshmem"}])
def test_what_this_version_lacks_is_said(arguments: dict[str, str]) -> None:
    with pytest.raises(mc.TransportUnavailable, match=next(iter(arguments.values()))):
        run_threads(_made, 1, mc.MoeConfig(**BASE), arguments, arguments)


def _made(group: mc.Group, cfg: mc.MoeConfig, *arguments: dict[str, str]) -> None:
    with mc.MoeComm(cfg, group, **arguments[group.rank]):
        group.barrier(20)


def _refused(
    group: mc.Group,
    cfg: mc.MoeConfig,
    other: mc.MoeConfig,
    arguments: dict[str, str],
    other_arguments: dict[str, str],
) -> str:
    odd = group.rank == ODD
    with pytest.raises(mc.ConfigError) as caught:
        mc.MoeComm(other if odd else cfg, group, **(other_arguments if odd else arguments))
    return str(caught.value)


def _then_fine(group: mc.Group) -> str:
    cfg = mc.MoeConfig(**BASE)
    error = _refused(group, cfg, dataclasses.replace(cfg, max_tokens=16), {}, {})
    _made(group, cfg, {}, {})
    return error


def _with_group_transport(group: mc.Group) -> str:
    group.transport = "nvlink"
    with pytest.raises(mc.TransportUnavailable) as caught:
        mc.MoeComm(mc.MoeConfig(**BASE), group)
    return str(caught.value)
