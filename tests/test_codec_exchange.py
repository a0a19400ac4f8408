"""Exchanges through codecs in the simulation: bit for bit what plain Python says."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
from codec_examples import ALL, EXAMPLE, Int8PerToken, OffsetBinary, Steps16, Truncated
from exchange import Case, make_case, run_case
from payload import assert_same_bits
from remote import World, pretend, simulate_remote
from simulated import exchange
from threads import run_threads

import moecomm as mc
from moecomm import fuzzing
from moecomm.emulator import simulate
from moecomm.remote import Remote
from moecomm.run import run

SEEDS = 44
# Rows of more chunks than a block has threads; blocks of columns end inside and at the end of it.
CFG = mc.MoeConfig(
    num_experts=7, top_k=3, hidden=1200, max_tokens=5, timeout_s=20.0, codec=Int8PerToken
)
SHAPES: dict[str, dict[str, Any]] = {
    "batched": {},
    "grouped": {"layout": "grouped", "expert_alignment": 8},
    "rank": {"layout": "rank"},
    "sender": {"reduce": "sender", "max_recv_tokens": 9},
    "replicas": {"layout": "grouped", "replicas": 2},
}


@pytest.mark.parametrize("decode_to", [None, "bfloat16"])
@pytest.mark.parametrize("wire", ["lines", "flags"])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_over_layouts_and_wires(shape: str, wire: str, decode_to: str | None) -> None:
    cfg = dataclasses.replace(CFG, **SHAPES[shape], wire=wire, decode_to=decode_to)
    exchange(cfg, 2 * cfg.replicas, steps=2)


@pytest.mark.parametrize("decode_to", [None, "float32"])
@pytest.mark.parametrize("hidden", [1, 7, 33, 203])
def test_odd_rows(hidden: int, decode_to: str | None) -> None:
    """No row starts on 16 bytes, and the last chunk of each is partly there."""
    for codec in (Int8PerToken, OffsetBinary, Truncated):
        cfg = dataclasses.replace(CFG, hidden=hidden, codec=codec, decode_to=decode_to)
        exchange(cfg, 2, input_dtype="float32")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_exchanges(seed: int) -> None:
    """Any configuration under an unfair schedule, with every check."""
    codec = list(ALL.values())[seed % len(ALL)]
    decode_to = (None, "bfloat16")[seed // len(ALL) % 2]
    case = fuzzing.draw_case(seed, fuzzing.Limits(dtype="bfloat16", steps=2))
    cfg = dataclasses.replace(case.cfg, codec=codec, decode_to=decode_to)
    fuzzing.run_case(dataclasses.replace(case, cfg=cfg), checks="strict")


@pytest.mark.parametrize(("block", "pow2"), [(16, False), (128, True)])
def test_fp8_as_a_codec_is_the_built_in_cast(block: int, pow2: bool) -> None:
    """Two communicators, of which one has the cast's own kernels, give the same bits."""
    codec = dataclasses.replace(CFG, codec=mc.codecs.fp8(block, pow2), layout="grouped")
    cast = dataclasses.replace(
        codec, codec=None, dispatch_dtype="float8_e4m3fn", scale_block=block, scale_pow2=pow2
    )
    case = make_case(cast, 3, input_dtype="bfloat16")
    mine = make_case(codec, 3, input_dtype="bfloat16")
    assert_same_bits(case.xs[0], mine.xs[0], "input")
    for have, want in zip(mine.recv, case.recv, strict=True):
        assert_same_bits(have.x, want.x, "x")
        assert_same_bits(have.x_scale, want.x_scale, "x_scale")
    for cfg in (codec, cast):
        simulate(_run, 3, cfg, dataclasses.replace(case, cfg=cfg), seed=1, checks="strict")


def _run(group: mc.Group, cfg: mc.MoeConfig, case: Case) -> None:
    with mc.MoeComm(cfg, group) as comm:
        run_case(comm, case)


@pytest.mark.parametrize("decode_to", [None, "bfloat16"])
@pytest.mark.parametrize("mode", ["proxied", "nvshmem"])
def test_peers_out_of_reach(mode: Any, decode_to: str | None, monkeypatch: Any) -> None:
    """Rows are encoded into what a mover, or NVSHMEM, brings across."""
    cfg = dataclasses.replace(CFG, hidden=104, max_tokens=13, layout="grouped", in_flight=1)
    cfg = dataclasses.replace(cfg, decode_to=decode_to, codec=OffsetBinary)
    world = World(Remote(mode=mode, private_records=3, chunk=3), [0, 1, 0])
    cases = [make_case(cfg, 3, step) for step in range(2)]
    pretend(monkeypatch, world)
    for seed in range(4):
        simulate_remote(world, _run_all, cases, seed=seed)


def _run_all(group: mc.Group, cases: list[Case]) -> None:
    with mc.MoeComm(cases[0].cfg, group) as comm:
        for case in cases:
            run_case(comm, case)
        group.barrier(60)


def _half_away(value, inverse):
    """Rounds halves away from zero: what a hasty author writes."""
    q = max(-127.0, min(127.0, value * inverse))
    return int(q + 0.5) if q > 0.0 else int(q - 0.5)


def test_a_wrong_codec_is_noticed() -> None:
    """One half in one row of all: the right codec rounds it to even."""
    wrong = mc.Codec(
        "Wrong", "int8", None, _half_away, Int8PerToken.decode, Int8PerToken.scale,
        Int8PerToken.inverse,
    )  # fmt: skip
    case = make_case(CFG, 2, tokens=[3, 2], input_dtype="float32")
    case.xs[1][:] = 0
    case.xs[1][0, :2] = 127.0, 2.5
    recv = mc.reference.dispatch(CFG, 2, case.xs, case.idxs)
    case = dataclasses.replace(case, recv=recv)
    simulate(_run, 2, CFG, case, seed=1)
    with pytest.raises(AssertionError, match="x"):
        simulate(_run, 2, dataclasses.replace(CFG, codec=wrong), case, seed=1)


def test_special_values_arrive_as_the_reference_says() -> None:
    """Zeros, infinities, NaN and numbers at both ends of float32."""
    x = np.zeros((5, CFG.hidden), np.float32)
    x[1, 3], x[1, 4] = np.nan, 2.0
    x[2, 5], x[2, 6] = np.inf, -3.0
    x[3] = np.float32(1e-45)
    x[4] = np.linspace(-3.4e38, 3.4e38, CFG.hidden)
    for codec, decode_to in ((Int8PerToken, "float16"), (Int8PerToken, None), (Steps16, None)):
        cfg = dataclasses.replace(CFG, codec=codec, decode_to=decode_to, wire="flags")
        case = make_case(cfg, 2, tokens=[5, 5], input_dtype="float32")
        case = dataclasses.replace(case, xs=[x, x])
        case = dataclasses.replace(case, recv=mc.reference.dispatch(cfg, 2, case.xs, case.idxs))
        simulate(_received, 2, case, seed=1)


def _received(group: mc.Group, case: Case) -> None:
    with mc.MoeComm(case.cfg, group) as comm:
        recv = comm.dispatch(case.xs[group.rank], case.idxs[group.rank])
        for expert, count in enumerate(recv.counts):
            want = case.recv[group.rank]
            assert_same_bits(recv.x[expert, :count], want.x[expert, :count], "x")
            if recv.x_scale is not None:
                scales = want.x_scale[expert, :count]
                assert_same_bits(recv.x_scale[expert, :count], scales, "x_scale")
        recv.handle.close()


def test_processes_get_the_codec_too() -> None:
    """It is pickled, found by its name there, and its functions are compiled in each."""
    cfg = dataclasses.replace(CFG, hidden=64, decode_to="bfloat16", timeout_s=60.0)
    case = make_case(cfg, 2, tokens=[3, 4])
    run(_run, 2, cfg, case, device="cpu", timeout_s=200)


def test_the_example_is_as_good_as_eight_bits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    errors = run(sys.modules["int8_codec"].exchange, 2, device="cpu", timeout_s=200)
    # Half a step of 127, then two roundings to bfloat16.
    assert 0.001 < max(errors) < 0.5 / 127 + 2 * 2**-9


# ---- errors ----------------------------------------------------------------------------------


def test_a_codec_that_differs_is_an_error_on_every_rank() -> None:
    other = mc.Codec(
        "Int8PerToken", "int8", None, _half_away, Int8PerToken.decode, Int8PerToken.scale,
        Int8PerToken.inverse,
    )  # fmt: skip
    for message in run_threads(_refused, 2, other):
        assert "codec differs between ranks: 'Int8PerToken: int8, a scale per token, " in message


def _refused(group: mc.Group, other: mc.Codec) -> str:
    cfg = dataclasses.replace(CFG, codec=other if group.rank else Int8PerToken)
    with pytest.raises(mc.ConfigError) as caught:
        mc.MoeComm(cfg, group)
    return str(caught.value)


def _rounding(value, scale):
    return round(value / scale)


def test_a_codec_that_cannot_be_used_is_an_error_on_every_rank() -> None:
    broken = mc.Codec("Broken", "int8", None, _rounding, Int8PerToken.decode, Int8PerToken.scale)
    cfg = dataclasses.replace(CFG, codec=broken)
    for message in run_threads(_broken, 2, cfg):
        assert "codec Broken: encode(value=" in message


def _broken(group: mc.Group, cfg: mc.MoeConfig) -> str:
    with pytest.raises(mc.CodecError) as caught:
        mc.MoeComm(cfg, group)
    return str(caught.value)


def test_what_dispatch_takes_with_a_codec() -> None:
    simulate(_arguments, 1)


def _arguments(group: mc.Group) -> None:
    idx = np.zeros((2, 3), np.int32)
    x = np.zeros((2, CFG.hidden), np.float32)
    with mc.MoeComm(CFG, group) as comm:
        with pytest.raises(mc.DtypeError, match="codec='Int8PerToken' encodes it"):
            comm.dispatch(x.astype(np.int8), idx)
        with pytest.raises(mc.ConfigError, match="x_scale given with codec='Int8PerToken'"):
            comm.dispatch(x, idx, x_scale=np.ones((2, 1), np.float32))
