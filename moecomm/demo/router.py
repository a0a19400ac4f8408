"""The router: which experts a token goes to, and how much each counts."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from moecomm.demo.text import vectors

ROUTER: Final = 2
SHARPNESS: Final = 1.5  # spread of the logits: how sure the router is
FAVOUR: Final = 0.5  # spread of the experts' biases: real routers do not load experts evenly


class Routing(NamedTuple):
    """``topk_idx`` [T, K] int32 distinct experts, best first; ``topk_weights`` [T, K] float32,
    positive, summing to 1 in each row."""

    topk_idx: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]


def route(x: npt.NDArray[np.float32], num_experts: int, top_k: int, seed: int) -> Routing:
    """Softmax over all experts, the ``top_k`` best, their shares scaled to sum to 1.

    x [T, H] float32. In float64, so that a token's experts do not depend on which other tokens
    share the matrix product: the sharded and the plain layer must choose alike.
    """
    hidden = x.shape[1]
    weight = vectors(ROUTER, 0, (num_experts, hidden), seed).astype(np.float64)
    bias = FAVOUR * vectors(ROUTER, 1, (num_experts,), seed).astype(np.float64)
    logits = x.astype(np.float64) @ weight.T * (SHARPNESS / np.sqrt(hidden)) + bias
    shares: npt.NDArray[Any] = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    shares /= shares.sum(axis=1, keepdims=True)
    topk_idx = np.argsort(-shares, axis=1, kind="stable")[:, :top_k]
    best = np.take_along_axis(shares, topk_idx, axis=1)
    best /= best.sum(axis=1, keepdims=True)
    return Routing(topk_idx.astype(np.int32), best.astype(np.float32))
