"""The custom ops: what they do, what tracing is told of their results, and their gradients.

Schemas are written out, since torch would read annotations, and its types are ``Any`` here. All
ops are functional: nothing that they return is an argument's memory, or the communicator's.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from moecomm.torch import gradients
from moecomm.torch.exchanges import named

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch.where has no fp8


# ---- dispatch --------------------------------------------------------------------------------


def _dispatch(
    x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any, comm: str
) -> tuple[Any, ...]:
    exchanges = named(comm)
    recv = exchanges.dispatch(x, topk_idx, topk_weights, x_scale, num_tokens)
    used = gradients.used_rows(recv)
    weights = None if topk_weights is None else recv.topk_weights
    return (
        _owned(recv.x, used),
        _nothing(x) if recv.x_scale is None else _owned(recv.x_scale, used),
        recv.counts.clone(),
        _nothing(x, torch.int32) if recv.offsets is None else recv.offsets.clone(),
        recv.num_rows.clone(),
        _nothing(x) if weights is None else _owned(weights, used),
        _nothing(x, torch.int32) if recv.topk_idx is None else _owned(recv.topk_idx, used, -1),
        torch.tensor([exchanges.ticket(recv.handle)], device="cpu"),
    )


def _dispatch_fake(
    x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any, comm: str
) -> tuple[Any, ...]:
    return named(comm).form.received(x.device, topk_weights is not None)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _x, topk_idx, topk_weights, _scale, num_tokens, comm = inputs
    ctx.of_x, _, ctx.of_weights, *_ = ctx.needs_input_grad
    gradients.check_differentiable(named(comm).comm.config, weights=ctx.of_weights)
    ctx.set_materialize_grads(False)  # a gradient that is not there needs no exchange
    ctx.save_for_backward(topk_idx, num_tokens)
    ctx.dtype = topk_weights.dtype if ctx.of_weights else None
    ctx.comm = comm


def _dispatch_gradient(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    rows, weights = grads[0], grads[5]
    topk_idx, num_tokens = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.of_x and rows is not None:
        grad_x = dispatch_backward(rows, topk_idx, num_tokens, ctx.comm)
    if ctx.of_weights and weights is not None:
        found = weights_backward(weights, topk_idx, num_tokens, ctx.comm)
        grad_weights = found.to(ctx.dtype)
    return grad_x, None, grad_weights, None, None, None


# ---- combine ---------------------------------------------------------------------------------


def _combine(
    y: Any,
    ticket: Any,
    topk_idx: Any,
    sent_weights: Any,
    topk_weights: Any,
    num_tokens: Any,
    comm: str,
) -> Any:
    exchanges = named(comm)
    handle = exchanges.find(int(ticket))
    if handle is None:
        handle = exchanges.dispatch_zeros(topk_idx, sent_weights, num_tokens).handle
    return exchanges.combine(y, handle, topk_weights, num_tokens)


def _combine_fake(
    y: Any,
    ticket: Any,
    topk_idx: Any,
    sent_weights: Any,
    topk_weights: Any,
    num_tokens: Any,
    comm: str,
) -> Any:
    return named(comm).form.result(topk_idx.shape[0], y.device)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, _ticket, topk_idx, sent_weights, topk_weights, num_tokens, comm = inputs
    ctx.given = topk_weights is not None  # then those hold
    ctx.of_weights = ctx.needs_input_grad[4 if ctx.given else 3]
    gradients.check_differentiable(named(comm).comm.config, weights=ctx.of_weights)
    ctx.save_for_backward(y, topk_idx, topk_weights if ctx.given else sent_weights, num_tokens)
    ctx.comm = comm


def _combine_gradient(ctx: Any, grad_out: Any) -> tuple[Any, ...]:
    y, topk_idx, weights, num_tokens = ctx.saved_tensors
    grad_y, grad_weights = combine_backward(
        grad_out, y, topk_idx, weights, num_tokens, ctx.of_weights, ctx.comm
    )
    found = grad_weights.to(weights.dtype) if ctx.of_weights else None
    at_dispatch, at_combine = (None, found) if ctx.given else (found, None)
    return grad_y, None, None, at_dispatch, at_combine, None, None


# ---- their gradients, which are exchanges too --------------------------------------------------


def _dispatch_backward(grad: Any, topk_idx: Any, num_tokens: Any, comm: str) -> Any:
    return gradients.of_x(named(comm), grad, topk_idx, num_tokens)


def _dispatch_backward_fake(grad: Any, topk_idx: Any, num_tokens: Any, comm: str) -> Any:
    return named(comm).form.result(topk_idx.shape[0], grad.device)


def _weights_backward(grad: Any, topk_idx: Any, num_tokens: Any, comm: str) -> Any:
    return gradients.of_sent_weights(named(comm), grad, topk_idx, num_tokens)


def _weights_backward_fake(grad: Any, topk_idx: Any, num_tokens: Any, comm: str) -> Any:
    return torch.empty(topk_idx.shape, dtype=torch.float32, device=grad.device)


def _combine_backward(
    grad: Any, y: Any, topk_idx: Any, weights: Any, num_tokens: Any, weights_too: bool, comm: str
) -> tuple[Any, Any]:
    exchanges = named(comm)
    found = gradients.of_y(exchanges, grad, y, topk_idx, weights, num_tokens, weights_too)
    grad_y, grad_weights = found
    return grad_y, _nothing(y) if grad_weights is None else grad_weights


def _combine_backward_fake(
    grad: Any, y: Any, topk_idx: Any, weights: Any, num_tokens: Any, weights_too: bool, comm: str
) -> tuple[Any, Any]:
    grad_y = torch.empty(named(comm).form.recv_shape, dtype=y.dtype, device=y.device)
    shape = topk_idx.shape if weights_too else (0,)
    return grad_y, torch.empty(shape, dtype=torch.float32, device=y.device)


# ---- registration ------------------------------------------------------------------------------


def _register(name: str, schema: str, does: Any, fake: Any) -> Any:
    op = torch.library.custom_op(f"moecomm::{name}", does, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


dispatch: Final = _register(
    "dispatch",
    "(Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor? x_scale, Tensor? num_tokens, "
    "str comm) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _dispatch_fake,
)
dispatch.register_autograd(_dispatch_gradient, setup_context=_dispatch_setup)
combine: Final = _register(
    "combine",
    "(Tensor y, Tensor ticket, Tensor topk_idx, Tensor? sent_weights, Tensor? topk_weights, "
    "Tensor? num_tokens, str comm) -> Tensor",
    _combine,
    _combine_fake,
)
combine.register_autograd(_combine_gradient, setup_context=_combine_setup)
dispatch_backward: Final = _register(
    "dispatch_backward",
    "(Tensor grad, Tensor topk_idx, Tensor? num_tokens, str comm) -> Tensor",
    _dispatch_backward,
    _dispatch_backward_fake,
)
weights_backward: Final = _register(
    "weights_backward",
    "(Tensor grad, Tensor topk_idx, Tensor? num_tokens, str comm) -> Tensor",
    _weights_backward,
    _weights_backward_fake,
)
combine_backward: Final = _register(
    "combine_backward",
    "(Tensor grad, Tensor y, Tensor topk_idx, Tensor weights, Tensor? num_tokens, "
    "bool weights_too, str comm) -> (Tensor, Tensor)",
    _combine_backward,
    _combine_backward_fake,
)


# ---- results -----------------------------------------------------------------------------------


def _owned(array: Any, used: Any, otherwise: int = 0) -> Any:
    """A copy with ``otherwise`` in every row that is not ``used``; in one pass."""
    mask = used.reshape(*used.shape, *(1,) * (array.dim() - used.dim()))
    words = array.view(_WORDS[array.element_size()])
    return torch.where(mask, words, otherwise).view(array.dtype)


def _nothing(like: Any, dtype: Any = torch.float32) -> Any:
    """What an op returns in place of ``None``."""
    return torch.empty(0, dtype=dtype, device=like.device)
