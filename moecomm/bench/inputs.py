"""What ranks exchange in a measurement: routing, rows and expert outputs, the same wherever made.

Every rank makes every rank's inputs from seeds, so that it can tell what it must receive without
being told. Letters: R ranks, T tokens of a rank, K ``top_k``, H ``hidden``, S scales a row.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from moecomm.bench.options import FP8, Case
from moecomm.config import MoeConfig

SMALLEST = 1e-30  # what device code takes for the largest value of an all-zero block
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """All ranks' inputs as torch tensors on one device.

    Attributes:
        x: ``[R, T, H]`` as dispatch is given it.
        wire: ``[R, T, H]`` as it travels.
        scale: ``[R, T, S]`` float32, or ``None``.
        given_scale: ``scale`` where ``x`` is quantised already, else ``None``.
        idx: ``[R, T, K]`` int64, distinct experts in a row.
        weights: ``[R, T, K]`` float32.
    """

    x: Any
    wire: Any
    scale: Any
    given_scale: Any
    idx: Any
    weights: Any


def make_inputs(cfg: MoeConfig, case: Case, num_ranks: int, seed: int, device: str) -> Inputs:
    """Inputs of all ranks; equal wherever the device's random numbers are."""
    torch = importlib.import_module("torch")
    shape = num_ranks, case.num_tokens
    numbers = torch.Generator(device=device).manual_seed(seed)
    values = torch.randn((*shape, cfg.hidden), generator=numbers, device=device)
    idx = routing(torch, cfg, case.routing, num_ranks * case.num_tokens, seed)
    idx = idx.view(*shape, cfg.top_k).to(device)
    weights = torch.rand((*shape, cfg.top_k), generator=numbers, device=device)
    weights /= weights.sum(-1, keepdim=True)
    dtype = getattr(torch, "bfloat16" if case.input_dtype == FP8 else case.input_dtype)
    x, scale = values.to(dtype), None
    wire = x
    if cfg.dispatch_dtype == FP8:
        wire, scale = cast(torch, x, cfg.scale_block)
    given = case.input_dtype == FP8
    return Inputs(
        x=wire if given else x,
        wire=wire,
        scale=scale,
        given_scale=scale if given else None,
        idx=idx,
        weights=weights,
    )


def routing(torch: Any, cfg: MoeConfig, name: str, rows: int, seed: int) -> Any:
    """``[rows, K]`` distinct experts: all equally likely, or by Zipf's law (exponent 1), where
    which experts are the popular ones is random but the same for all ranks."""
    numbers = torch.Generator().manual_seed(seed)
    odds = torch.ones(cfg.num_experts)
    if name == "zipf":
        order = torch.randperm(cfg.num_experts, generator=torch.Generator().manual_seed(0))
        odds = 1.0 / (1 + order)
    return torch.multinomial(odds.expand(rows, -1), cfg.top_k, generator=numbers)


def cast(torch: Any, x: Any, block: int | None) -> tuple[Any, Any]:
    """Rows in fp8 and their scales, as dispatch casts them: bit for bit."""
    values = x.float()
    if block is None:
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), None
    hidden = values.shape[-1]
    num = -(-hidden // block)
    padded = torch.nn.functional.pad(values, (0, num * block - hidden))
    blocks = padded.view(*values.shape[:-1], num, block)
    largest = blocks.abs().amax(-1).clamp(min=SMALLEST)
    # Tensor by tensor: torch turns a division by or of a Python number into a multiplication.
    most = torch.full_like(largest, FP8_MAX)
    inverse = most / largest
    scaled = (blocks * inverse[..., None]).clamp(-FP8_MAX, FP8_MAX)
    rows = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    rows = rows.view(*values.shape[:-1], num * block)[..., :hidden].contiguous()
    return rows.view(torch.float8_e4m3fn), largest / most


def expand(rows: Any, scale: Any, block: int | None) -> Any:
    """Rows ``[..., H]`` in float32, scales applied."""
    values = rows.float()
    if scale is None or block is None:
        return values
    return values * scale.repeat_interleave(block, -1)[..., : values.shape[-1]]


def expert_output(values: Any, expert: Any, dtype: Any) -> Any:
    """What expert ``e`` makes of a row: ``x * (1 + e % 7)``. ``values [N, H]``, ``expert [N]``."""
    return (values * (1 + expert % 7)[:, None].float()).to(dtype)
