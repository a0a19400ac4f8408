"""A codec of one's own: rows travel as int8 with one scale per token, half of bfloat16's bytes.

Compiled by numba and inlined into the kernels, for GPUs and for the CPU's emulator alike:

    python examples/int8_codec.py
"""

from __future__ import annotations

import numpy as np

import moecomm as mc


@mc.codec(wire_dtype="int8")
class Int8PerToken:
    """The largest magnitude of a row becomes 127."""

    @staticmethod
    def scale(amax: float) -> float:
        return amax / 127.0

    @staticmethod
    def inverse(amax: float) -> float:
        """What encode multiplies with: one division a token, not one an element."""
        return 127.0 / amax if amax > 0.0 else 0.0

    @staticmethod
    def encode(value: float, inverse: float) -> int:
        return round(max(-127.0, min(127.0, value * inverse)))  # to even; NaN becomes 127

    @staticmethod
    def decode(bits: int, scale: float) -> float:
        return float(np.float32(bits) * scale)


cfg = mc.MoeConfig(
    num_experts=8,
    top_k=2,
    hidden=256,
    max_tokens=64,
    codec=Int8PerToken,
    decode_to="bfloat16",  # left out: recv.x is int8, with its scales in recv.x_scale
)


def exchange(group: mc.Group) -> float:
    """Send random rows to experts that give them back; the largest error for a row's largest."""
    rng = np.random.default_rng(group.rank)
    x = rng.standard_normal((50, cfg.hidden), np.float32)
    topk_idx = (np.arange(50)[:, None] + [0, 3]) % cfg.num_experts
    weights = np.full((50, 2), 0.5, np.float32)
    with mc.MoeComm(cfg, group) as comm:
        recv = comm.dispatch(x, topk_idx, weights)
        out = comm.combine(np.array(recv.x), recv.handle)
    error = np.abs(out.astype(np.float32) - x).max(axis=1) / np.abs(x).max(axis=1)
    return float(error.max())


if __name__ == "__main__":
    errors = mc.run(exchange, 4)
    print("largest error on each rank, as a share of the row's largest value:", errors)
