"""Dispatch and combine as torch custom ops: compiled, under checkpointing, and their gradients."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch._dynamo.testing  # torch itself leaves it out
import torch_ranks
from payload import assert_same_bits
from torch_checks import assert_exchanged, assert_gradients
from torch_ranks import BACKENDS, BASE, EXCHANGES, FLOATS, LAYERS, NUM_RANKS, alone, compiled

import moecomm as mc
from moecomm.torch import TorchOps, ops

pytestmark = pytest.mark.usefixtures("poisoned")

WAYS = ("plain", *BACKENDS)
MODES = (
    "plain", "checkpoint", "compiled", "compiled-inside", "checkpoint-eager", "checkpoint-aot_eager"
)  # fmt: skip
T, K, H, E = 4, BASE["top_k"], BASE["hidden"], BASE["num_experts"]


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return mc.run(torch_ranks.all_of_it, NUM_RANKS, timeout_s=300)


@pytest.fixture(scope="module")
def exchanged(ranks: list[Any]) -> list[Any]:
    return [found for found, _, _ in ranks]


@pytest.fixture(scope="module")
def trained(ranks: list[Any]) -> list[Any]:
    return [found for _, _, found in ranks]


def inputs(tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x, topk_idx, topk_weights``."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator)
    idx = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    return x, idx, torch.rand(tokens, K, generator=generator)


# ---- what they return ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXCHANGES)
def test_e07_the_ops_give_what_the_reference_gives(
    exchanged: list[Any], name: str, way: str
) -> None:
    """Compiled or not; in unused rows, too."""
    for rank in range(NUM_RANKS):
        assert_exchanged(name, rank, exchanged[rank][name][way])


def test_e07_two_communicators_in_one_graph(ranks: list[Any]) -> None:
    for _, pairs, _ in ranks:
        for actual, expected in pairs:
            assert_same_bits(actual, expected, "out")


def test_results_are_the_callers() -> None:
    """The next exchange takes the same slot, and writes nothing into them."""
    x, idx, weights = inputs()
    with alone(**FLOATS, in_flight=1) as one:
        recv = one.dispatch(x, idx)
        before = recv.x.clone()
        one.combine(recv.x, recv, weights)
        again = one.dispatch(-x, idx)
        assert torch.equal(recv.x, before)
        assert torch.equal(again.x, -before)


# ---- compiling -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["dispatch", "combine", "dispatch_backward", "weights_backward", "combine_backward"]
)
def test_torchs_own_check_of_an_op(op: str) -> None:
    x, idx, weights = inputs()
    with alone(**FLOATS) as one:
        recv = one.dispatch(x, idx)
        y, rows = recv.x.clone(), recv.x.sum(-1)
        for tensor in (x, weights, y):
            tensor.requires_grad_(not op.endswith("backward"))
        arguments = {
            "dispatch": (x, idx, weights, None, None, one.name),
            "combine": (y, recv.ticket, idx, None, weights, None, one.name),
            "dispatch_backward": (y, idx, None, one.name),
            "weights_backward": (rows, idx, None, one.name),
            "combine_backward": (x, y, idx, weights, None, True, one.name),
        }[op]
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if op != "dispatch":  # whose ticket is another each time, and the last check compares it
            checks.append("test_aot_dispatch_dynamic")
        found = torch.library.opcheck(getattr(ops, op), arguments, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}


def test_another_number_of_tokens_compiles_once_more_and_not_again() -> None:
    with alone(**FLOATS) as one:
        frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def layer(x: Any, idx: Any, weights: Any) -> Any:
            recv = one.dispatch(x, idx)
            return one.combine(torch.sin(recv.x), recv, weights)

        call = compiled(layer, frames)
        for tokens, compiles in ((4, 1), (4, 1), (6, 2), (5, 2), (3, 2), (2, 2)):
            given = inputs(tokens)
            assert torch.equal(call(*given), layer(*given))
            assert frames.frame_count == compiles


def test_num_tokens_is_data() -> None:
    """Another number in it compiles nothing; rows past it are 0, in gradients too."""
    with alone(**FLOATS) as one:
        frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def layer(x: Any, idx: Any, weights: Any, num_tokens: Any = None) -> Any:
            recv = one.dispatch(x, idx, num_tokens=num_tokens)
            return one.combine(torch.sin(recv.x), recv, weights)

        call = compiled(layer, frames)
        for number in (3, 4, 0, 2):
            x, idx, weights = inputs()
            idx[number:] = 99  # nobody reads it
            x.requires_grad_()
            weights.requires_grad_()
            out = call(x, idx, weights, torch.tensor([number], dtype=torch.int32))
            out.square().sum().backward()
            y, v = (a.detach()[:number].requires_grad_() for a in (x, weights))
            cut = layer(y, idx[:number], v)
            cut.square().sum().backward()
            for whole, part in ((out, cut), (x.grad, y.grad), (weights.grad, v.grad)):
                assert torch.equal(whole[:number], part)
                assert not whole[number:].any()
        assert frames.frame_count == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 7},
        {"reduce": "sender"},
        {"codec": mc.codecs.fp8(), "decode_to": "bfloat16"},
        {"num_experts": 6},
    ],
)
def test_names_differ_where_graphs_do(fields: dict[str, Any]) -> None:
    """torch may take a graph that another process has left on disk, checks and all."""
    bf16 = {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"}
    endings = []
    for given in ({}, {}, fields):
        with alone(**bf16, **given) as one:
            endings.append(one.name.split(".")[1])
    assert endings[0] == endings[1] != endings[2]


# ---- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_e08_gradients_are_those_of_an_unsharded_layer(
    trained: list[Any], name: str, mode: str
) -> None:
    """Of tokens, router weights and experts."""
    found = [trained[rank][name][mode] for rank in range(NUM_RANKS)]
    assert_gradients(name, mode, torch_ranks.dense_layer(name), found)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", LAYERS)
def test_e07_checkpointing_and_compiling_change_no_bit(
    trained: list[Any], name: str, mode: str
) -> None:
    for rank in range(NUM_RANKS):
        for key, want in trained[rank][name]["plain"].items():
            assert_same_bits(trained[rank][name][mode][key], want, f"rank {rank}: {key}")


@pytest.mark.parametrize("layout", ["batched", "grouped"])
def test_e08_weights_that_dispatch_brings_along_have_a_gradient(layout: str) -> None:
    """Applied by the experts, they learn as they do when combine applies them."""
    x, idx, weights = inputs()
    idx[1, 2], idx[2, 0] = idx[1, 0], -1
    ones = torch.ones_like(weights)
    ones[1, 2] = 0  # one row stands for both slots
    with alone(**FLOATS, layout=layout) as one:
        grads = []
        for travel in (True, False):
            given, rows = weights.clone().requires_grad_(), x.clone().requires_grad_()
            recv = one.dispatch(rows, idx, given if travel else None)
            y = torch.sin(recv.x)
            y = y * recv.topk_weights[..., None] if travel else y
            out = one.combine(y, recv, ones if travel else given)
            out.square().sum().backward()
            grads.append((given.grad, rows.grad))
        for travelled, applied in zip(*grads, strict=True):
            torch.testing.assert_close(travelled, applied)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "rank"}, "layout='rank' with an input that requires grad"),
        ({"combine_dtype": "bfloat16"}, "dispatch_dtype='float32' with"),
        ({"hidden": 4}, "hidden=4 with .* at least num_experts=5"),
    ],
)
def test_e08_gradients_that_there_are_not_are_refused(fields: dict[str, Any], message: str) -> None:
    _, idx, weights = inputs()
    with alone(**{**FLOATS, **fields}) as one:
        x = torch.ones(T, fields.get("hidden", H), requires_grad=True)
        with pytest.raises(mc.ConfigError, match=message):
            one.dispatch(x, idx, weights.requires_grad_())
        wrapped = torch._dynamo.exc.TorchDynamoException
        with pytest.raises(wrapped, match=message):  # while it compiles
            compiled(one.dispatch, "aot_eager")(x, idx, weights)
        with torch.no_grad():
            recv = one.dispatch(x, idx, weights)
        assert recv.counts.sum() > 0


# ---- exchanges that are left open, or closed -------------------------------------------------


def test_a_combine_whose_exchange_is_closed_dispatches_again() -> None:
    """The compiler may merge two dispatches, or bring one forward: results stay the same."""
    x, idx, weights = inputs()
    for fields in ({}, {"reduce": "sender"}, {"layout": "rank"}):
        with alone(**FLOATS, **fields, in_flight=2) as one:
            sent, given = (weights, None) if fields else (None, weights)
            recvs = [one.dispatch(x * 2**n, idx, sent) for n in range(3)]
            outs = [one.combine(recv.x, recv, given) for recv in (*recvs, recvs[2])]
            for out, factor in zip(outs, (1, 2, 4, 4), strict=True):
                assert torch.equal(out, outs[0] * factor)
            assert outs[0].any()


def test_another_communicators_exchange_is_none_of_ours() -> None:
    """Open ones of both may have equal serial numbers; the result is still that of the tokens."""
    x, idx, weights = inputs()
    with alone(**FLOATS) as one, alone(**FLOATS) as other:
        recv = one.dispatch(x, idx)
        other.dispatch(x, idx.flip(0))
        out = other.combine(recv.x, recv, weights)
        assert torch.equal(out, one.combine(recv.x, recv, weights))


def test_ops_that_are_made_anew_know_what_the_last_left_open() -> None:
    x, idx, weights = inputs()
    with alone(**FLOATS, in_flight=1) as one:
        comm = one._exchanges.comm
        one.dispatch(x, idx)
        del one
        gc.collect()
        anew = TorchOps(comm)
        recv = anew.dispatch(x, idx)
        assert anew.combine(recv.x, recv, weights).any()


# ---- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"reduce": "sender"}])
def test_a_combine_that_was_refused_may_be_tried_again(fields: dict[str, Any]) -> None:
    """Nothing was sent, so this rank is still in step with the others."""
    x, idx, weights = inputs()
    sent, given, refused = (weights, None, weights) if fields else (None, weights, weights[:, :2])
    with alone(**FLOATS, **fields, in_flight=1) as one:
        recv = one.dispatch(x, idx, sent)
        for y, other in ((recv.x, refused), (recv.x.half(), given)):
            with pytest.raises(mc.ConfigError):
                one.combine(y, recv, other)
        sent_tokens = one._exchanges.comm.stats().dispatch_tokens
        assert one.combine(recv.x, recv, given).any()
        assert one._exchanges.comm.stats().dispatch_tokens == sent_tokens  # not dispatched again


@pytest.mark.parametrize("way", WAYS)
def test_what_breaks_a_rule_raises_the_named_error(way: str) -> None:
    x, idx, weights = inputs()
    with alone(**FLOATS) as one:

        def layer(x: Any, idx: Any, weights: Any) -> Any:
            recv = one.dispatch(x, idx)
            return one.combine(recv.x, recv, weights)

        for arguments, error, message in (
            ((x.to(torch.float16), idx, weights), mc.DtypeError, "x has dtype float16"),
            ((x[:3], idx, weights), mc.ConfigError, "x has 3 tokens and topk_idx 4"),
            ((x, idx + E, weights), mc.ConfigError, r"topk_idx\[0, 0\]="),
            ((x, idx, weights[:, :2]), mc.ConfigError, r"topk_weights has shape \(4, 2\)"),
        ):
            call = layer if way == "plain" else compiled(layer, way)
            with pytest.raises(error, match=message):
                call(*arguments)
        assert torch.equal(layer(x, idx, weights * 0), x * 0)


def test_a_communicator_that_is_closed_or_gone_is_named() -> None:
    x, idx, _ = inputs()
    with alone(**FLOATS) as one:
        name = one.name
        assert TorchOps(one._exchanges.comm).name == name
    with pytest.raises(mc.StateError, match="this MoeComm is closed"):
        one.dispatch(x, idx)
    del one
    gc.collect()
    with pytest.raises(mc.StateError, match=f"comm='{name}': no communicator"):
        torch.ops.moecomm.dispatch(x, idx, None, None, None, name)
