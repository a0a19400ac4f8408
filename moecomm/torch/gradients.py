"""Gradients of dispatch and of combine, by exchanges with the same routing.

With rows r = (token t, expert e), and W the weight of e at t (the sum, where a token names it in
several slots):

    dispatch   x_r = x_t                 grad x_t = sum over r of grad x_r       a combine
    combine    out_t = sum of W_r y_r    grad y_r = W_r grad out_t               a dispatch
                                         grad w_tk = <y_r, grad out_t>           its combine

The last is known where the expert is, and is brought back in the column that is the expert's own
number of a row that is otherwise zero; so nobody needs to know whose slot it was.
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm import dtypes
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.handle import Received
from moecomm.torch.exchanges import Exchanges


def check_differentiable(cfg: MoeConfig, *, weights: bool) -> None:
    """``weights``: some of those require grad.

    Raises:
        ConfigError: gradients of such an exchange are not there.
    """
    rules = (
        ("layout", cfg.layout, "'batched' or 'grouped'", cfg.layout != "rank"),
        ("reduce", cfg.reduce, "'receiver'", cfg.reduce == "receiver"),
        ("replicas", cfg.replicas, "1", cfg.replicas == 1),
        ("codec", cfg.codec, "None", cfg.codec is None),
        (
            "dispatch_dtype",
            cfg.dispatch_dtype,
            f"combine_dtype={cfg.combine_dtype!r}, since gradients go the other way",
            cfg.dispatch_dtype == cfg.combine_dtype,
        ),
        (
            "hidden",
            cfg.hidden,
            f"at least num_experts={cfg.num_experts}, for gradients of topk_weights",
            not weights or cfg.hidden >= cfg.num_experts,
        ),
    )
    for name, value, rule, holds in rules:
        if not holds:
            raise ConfigError(
                f"{name}={value!r} with an input that requires grad: must be {rule}; or call under "
                "torch.no_grad()"
            )


def used_rows(recv: Received) -> Any:
    """bool [L, C] or [N]: rows with defined contents; those of pads are 0."""
    rows = recv.src_token.shape
    numbers = torch.arange(rows[-1], device=recv.counts.device)
    if len(rows) == 2:
        return numbers < recv.counts[:, None]
    return numbers < recv.num_rows


def of_x(exchanges: Exchanges, grad: Any, topk_idx: Any, num_tokens: Any) -> Any:
    """[T, H], from the gradient of the rows that dispatch returned."""
    handle = exchanges.dispatch_zeros(topk_idx, None, num_tokens).handle
    ones = first_slots(topk_idx).to(torch.float32)
    return exchanges.combine(grad.contiguous(), handle, ones, num_tokens)


def of_sent_weights(exchanges: Exchanges, grad: Any, topk_idx: Any, num_tokens: Any) -> Any:
    """float32 [T, K], from the gradient of the weights that dispatch returned, one a row."""
    recv = exchanges.dispatch_zeros(topk_idx, None, num_tokens)
    return _to_slots(exchanges, recv, grad, topk_idx, num_tokens)


def of_y(
    exchanges: Exchanges,
    grad: Any,
    y: Any,
    topk_idx: Any,
    weights: Any,
    num_tokens: Any,
    weights_too: bool,
) -> tuple[Any, Any | None]:
    """``y``'s shape, and float32 [T, K] if ``weights_too``, from the gradient of combine's result.

    All of it is computed in float32 and rounded once.
    """
    recv = exchanges.dispatch(grad.contiguous(), topk_idx, weights, None, num_tokens)
    assert recv.topk_weights is not None  # they were given
    used = used_rows(recv)[..., None]
    rows = torch.where(used, recv.x, 0).to(torch.float32)
    grad_y = torch.where(used, recv.topk_weights[..., None], 0) * rows
    if not weights_too:
        exchanges.close(recv.handle)
        return grad_y.to(y.dtype), None
    products = (rows * torch.where(used, y, 0)).sum(-1)
    grad_weights = _to_slots(exchanges, recv, products, topk_idx, num_tokens)
    return grad_y.to(y.dtype), grad_weights


def _to_slots(
    exchanges: Exchanges, recv: Received, values: Any, topk_idx: Any, num_tokens: Any
) -> Any:
    """One number a row of ``recv``, back at every slot that the row stands for: float32 [T, K]."""
    comm = exchanges.comm
    columns = _experts(recv) + comm.expert_range(comm.group.rank).start
    dtype = dtypes.torch_dtype(torch, comm.config.combine_dtype)
    y = torch.zeros(exchanges.form.recv_shape, dtype=dtype, device=values.device)
    y.scatter_(-1, columns[..., None], values[..., None].to(dtype))
    ones = first_slots(topk_idx).to(torch.float32)
    by_expert = exchanges.combine(y, recv.handle, ones, num_tokens).to(torch.float32)
    slots = topk_idx.clamp(0, comm.config.num_experts - 1).to(torch.int64)
    return torch.where(topk_idx >= 0, by_expert.gather(1, slots), 0)


def first_slots(topk_idx: Any) -> Any:
    """bool [T, K]: slots that name an expert for the first time in their row."""
    same = topk_idx[:, :, None] == topk_idx[:, None, :]  # [T, K, K]
    return (topk_idx >= 0) & ~same.tril(-1).any(-1)


def _experts(recv: Received) -> Any:
    """int64 [L, C] or [N]: the local expert of each row; any, for rows that nobody sent."""
    assert recv.offsets is not None
    num_local, rows = recv.counts.shape[0], recv.src_token.shape
    if len(rows) == 2:
        return torch.arange(num_local, device=recv.counts.device)[:, None].expand(rows)
    numbers = torch.arange(rows[0], dtype=torch.int32, device=recv.counts.device)
    found = torch.searchsorted(recv.offsets[1:].contiguous(), numbers, right=True)
    return found.clamp(max=max(num_local - 1, 0))
