"""What ranks do in ``test_torch_ops.py``: they return what they got, and the tests compare it.

Apart from the tests, whose imports each rank's process would repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from exchange import Case, make_case
from schedules import dispatch_arguments
from tensors import to_numpy, to_torch
from torch.utils.checkpoint import checkpoint

import moecomm as mc
from moecomm.store_local import LocalStore
from moecomm.torch import Dispatched, TorchOps

BASE: dict[str, Any] = {
    "num_experts": 5, "top_k": 3, "hidden": 32, "max_tokens": 6, "timeout_s": 60.0
}  # fmt: skip
EXCHANGES: dict[str, tuple[dict[str, Any], str | None]] = {
    "batched-bf16": ({}, None),
    "sender-fp32": (
        {"reduce": "sender", "dispatch_dtype": "float32", "combine_dtype": "float32"},
        None,
    ),
    "grouped-fp8": (
        {
            "layout": "grouped",
            "expert_alignment": 4,
            "dispatch_dtype": "float8_e4m3fn",
            "scale_block": 16,
        },
        "bfloat16",
    ),
    "rank-fp16": (
        {"layout": "rank", "dispatch_dtype": "float16", "combine_dtype": "float16"},
        None,
    ),
}
# name → fields of the configuration.
LAYERS: dict[str, dict[str, Any]] = {
    "batched": {},
    "grouped-one-slot": {"layout": "grouped", "expert_alignment": 4, "in_flight": 1},
    "batched-bf16": {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"},
}
BACKENDS = ("eager", "aot_eager")
NUM_RANKS = 2
FLOATS = {"dispatch_dtype": "float32", "combine_dtype": "float32"}


def config(**fields: Any) -> mc.MoeConfig:
    return mc.MoeConfig(**{**BASE, **fields})


def exchange_case(name: str) -> Case:
    fields, input_dtype = EXCHANGES[name]
    return make_case(config(**fields), NUM_RANKS, 3, tokens=(6, 4), input_dtype=input_dtype)


@contextmanager
def alone(**fields: Any) -> Iterator[TorchOps]:
    """Ops of a group of one."""
    with mc.MoeComm(config(**fields), mc.Group(0, 1, LocalStore())) as comm:
        yield TorchOps(comm)


def compiled(fn: Callable[..., Any], backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


def all_of_it(
    group: mc.Group, backends: Sequence[str] = BACKENDS, device: str | None = None
) -> tuple[Any, Any, Any]:
    """In one start of the processes, which takes longer than what they do.

    ``device``: of every rank's communicators, as ``MoeComm`` takes it.
    """
    torch.set_num_threads(1)
    return (
        exchanges(group, backends, device),
        two_communicators(group, device),
        layers(group, backends, device),
    )


def _place(comm: mc.MoeComm) -> torch.device:
    """Where its tensors are; new ones and torch's streams are there, too."""
    if comm.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(comm.device[1])
    return torch.device("cuda", comm.device[1])


# ---- exchanges -------------------------------------------------------------------------------


def exchanges(
    group: mc.Group, backends: Sequence[str], device: str | None
) -> dict[str, dict[str, Any]]:
    """Case → backend (or "plain": not compiled) → every array of ``Dispatched``, and ``out``."""
    return {name: _exchange(group, exchange_case(name), backends, device) for name in EXCHANGES}


def _exchange(
    group: mc.Group, case: Case, backends: Sequence[str], device: str | None
) -> dict[str, Any]:
    rank = group.rank
    with mc.MoeComm(case.cfg, group, device=device) as comm:
        where, ops = _place(comm), TorchOps(comm)
        x, idx, sent, scale = (
            None if a is None else to_torch(a).to(where) for a in dispatch_arguments(case, rank)
        )
        y = to_torch(case.ys[rank]).to(where)
        weights = None if case.weights_at_dispatch else to_torch(case.weights[rank]).to(where)

        def both() -> tuple[Dispatched, Any]:
            recv = ops.dispatch(x, idx, sent, scale)
            return recv, ops.combine(y, recv, weights)

        ways = {"plain": both, **{backend: compiled(both, backend) for backend in backends}}
        found = {way: _as_numpy(*call()) for way, call in ways.items()}
        group.barrier(60)
    return found


def _as_numpy(recv: Dispatched, out: Any) -> dict[str, Any]:
    named = {**recv._asdict(), "out": out}
    return {name: None if a is None else to_numpy(a.cpu()) for name, a in named.items()}


def two_communicators(group: mc.Group, device: str | None) -> list[tuple[Any, Any]]:
    """What two layers of different shapes give in one graph, and what each gives alone."""
    first = mc.MoeComm(config(**FLOATS), group, device=device)
    second = mc.MoeComm(config(**FLOATS, layout="grouped", max_tokens=9), group, device=device)
    where, rng = _place(first), torch.Generator().manual_seed(group.rank)
    x = torch.rand(4, BASE["hidden"], generator=rng).to(where)
    idx = torch.randint(0, 5, (4, 3), generator=rng).to(where)
    weights = torch.rand(4, 3, generator=rng).to(where)
    one, other = TorchOps(first), TorchOps(second)

    def both(x: Any) -> tuple[Any, Any]:
        left, right = one.dispatch(x, idx), other.dispatch(-x, idx)
        after = one.combine(left.x * 3, left, weights)
        return after, other.combine(right.x * 5, right, weights) + after

    expected = []
    with first, second:
        for comm, factor in ((first, 3), (second, -5)):
            recv = comm.dispatch(x, idx)
            expected.append(comm.combine(recv.x * factor, recv.handle, weights))
        expected[1] = expected[1] + expected[0]
        actual = compiled(both, "aot_eager")(x)
        group.barrier(60)
    return [(a.cpu().numpy(), e.cpu().numpy()) for a, e in zip(actual, expected, strict=True)]


# ---- gradients -------------------------------------------------------------------------------


def layer_inputs(name: str, rank: int) -> dict[str, torch.Tensor]:
    """``x``, ``idx``, ``weights`` and the loss's factors of one rank; ``experts`` of all.

    Among the routing are empty slots and experts that are named twice.
    """
    cfg = config(**{**FLOATS, **LAYERS[name]})
    case = make_case(cfg, NUM_RANKS, 5, tokens=(6, 4), dropped=0.2, repeated=0.3)
    shared, own = (torch.Generator().manual_seed(seed) for seed in (7, 8 + rank))
    dtype = getattr(torch, cfg.dispatch_dtype)
    tokens, hidden = case.xs[rank].shape
    return {
        "x": torch.randn(tokens, hidden, generator=own).to(dtype),
        "idx": to_torch(case.idxs[rank]),
        "weights": to_torch(case.weights[rank]),
        "factors": torch.randn(tokens, hidden, generator=own),
        "experts": torch.randn(cfg.num_experts, hidden, hidden, generator=shared).to(dtype) / 8,
    }


def layers(
    group: mc.Group, backends: Sequence[str], device: str | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Layer → way → output, and gradients of ``x``, ``weights`` and this rank's ``experts``."""
    return {name: _layer(group, name, backends, device) for name in LAYERS}


def _layer(
    group: mc.Group, name: str, backends: Sequence[str], device: str | None
) -> dict[str, dict[str, Any]]:
    cfg = config(**{**FLOATS, **LAYERS[name]})
    with mc.MoeComm(cfg, group, device=device) as comm:
        mine = comm.expert_range(group.rank)
        where, ops = _place(comm), TorchOps(comm)
        given = {key: a.to(where) for key, a in layer_inputs(name, group.rank).items()}

        def layer(x: Any, weights: Any, experts: Any) -> Any:
            recv = ops.dispatch(x, given["idx"])
            if cfg.layout == "batched":
                y = torch.tanh(recv.x @ experts)
            else:
                rows = torch.arange(recv.x.shape[0], dtype=torch.int32, device=where)
                owner = (rows[:, None] >= recv.offsets[1:]).sum(1)
                own = experts[owner.clamp(max=len(mine) - 1)]
                y = torch.tanh(torch.einsum("nh,nhk->nk", recv.x, own))
            return ops.combine(y, recv, weights)

        def checkpointed(*arguments: Any, within: Any = layer) -> Any:
            return checkpoint(within, *arguments, use_reentrant=False)

        def inside(*arguments: Any) -> Any:
            return checkpointed(*arguments, within=whole)

        whole = compiled(layer, "aot_eager")
        found = {
            "plain": _step(given, mine, layer),
            "checkpoint": _step(given, mine, checkpointed),
            "compiled": _step(given, mine, whole),
            "compiled-inside": _step(given, mine, inside),
        }
        for backend in backends:
            call = compiled(checkpointed, backend)
            found[f"checkpoint-{backend}"] = _step(given, mine, call)
        group.barrier(60)
    return found


def _step(given: dict[str, torch.Tensor], mine: range, call: Any) -> dict[str, Any]:
    """Twice, so that what the first left open shows."""
    for _ in range(2):
        experts = given["experts"][mine.start : mine.stop]
        x, weights, own = (
            a.clone().requires_grad_() for a in (given["x"], given["weights"], experts)
        )
        out = call(x, weights, own)
        (out.float() * given["factors"]).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad, "experts": own.grad}
    return {name: a.float().cpu().numpy() for name, a in found.items()}


def dense_layer(name: str) -> list[dict[str, Any]]:
    """The same of every rank, from one layer that has all experts, in float64."""
    ranks = [
        {key: a if key == "idx" else a.double() for key, a in layer_inputs(name, rank).items()}
        for rank in range(NUM_RANKS)
    ]
    experts = ranks[0]["experts"].clone().requires_grad_()
    outs = []
    for rank in ranks:
        rank["x"].requires_grad_()
        rank["weights"].requires_grad_()
        by_expert = torch.tanh(torch.einsum("th,ehk->tek", rank["x"], experts))
        chosen = by_expert.gather(
            1, rank["idx"].clamp(min=0).long()[..., None].expand(-1, -1, BASE["hidden"])
        )
        weights = rank["weights"].where(rank["idx"] >= 0, 0)
        outs.append((weights[..., None] * chosen).sum(1))
    sum((o * r["factors"]).sum() for o, r in zip(outs, ranks, strict=True)).backward()
    cfg = config()
    found = []
    for number, (out, rank) in enumerate(zip(outs, ranks, strict=True)):
        mine = mc.Layout(cfg, NUM_RANKS, number).expert_range(number)
        grads = rank["x"].grad, rank["weights"].grad, experts.grad[mine.start : mine.stop]
        arrays = dict(zip(("out", "x", "weights", "experts"), (out, *grads), strict=True))
        found.append({key: a.detach().numpy().astype(np.float32) for key, a in arrays.items()})
    return found
