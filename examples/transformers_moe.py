"""The MoE blocks of three public model families, their experts sharded over ranks.

    python examples/transformers_moe.py [--ranks 2 4]

Blocks of DeepSeek-V3, Mixtral and Qwen3-MoE come from the `transformers` package, in small sizes
with random weights (nothing is downloaded). Every rank keeps the router, a share of the tokens and
a share of the experts; tokens travel to their experts and back through moecomm. The output must be
that of the library's own, unsharded block.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import linear, silu
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moecomm as mc

HIDDEN, INNER, TOKENS, STEP_TOKENS = 128, 64, 75, 32  # 75: ranks get unequal numbers of tokens


@dataclass(frozen=True)
class Family:
    """A block's class, and its configuration at a size for a test. No number of experts here
    divides by 4: ranks host unequal numbers."""

    block: Callable[[Any], torch.nn.Module]
    config: Callable[[], Any]
    num_experts: int
    top_k: int


FAMILIES = {
    "DeepSeek-V3": Family(
        DeepseekV3MoE,
        lambda: DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_routed_experts=18,
            num_experts_per_tok=6,
            n_group=3,
            topk_group=2,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        ),
        num_experts=18,
        top_k=6,
    ),
    "Mixtral": Family(
        MixtralSparseMoeBlock,
        lambda: MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_local_experts=6,
            num_experts_per_tok=2,
        ),
        num_experts=6,
        top_k=2,
    ),
    "Qwen3-MoE": Family(
        Qwen3MoeSparseMoeBlock,
        lambda: Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            num_experts=15,
            num_experts_per_tok=4,
            norm_topk_prob=True,
        ),
        num_experts=15,
        top_k=4,
    ),
}

# dtype → largest difference, as a share of the largest output. The bfloat16 blocks of the library
# round after every expert; moecomm sums in float32 and rounds once.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def make_block(family: Family, dtype: torch.dtype) -> torch.nn.Module:
    """The library's block with random weights, the same in every process."""
    config = family.config()
    config._experts_implementation = "eager"  # the library's readable loop over experts
    block = family.block(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in chain(block.parameters(), block.buffers()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * HIDDEN**-0.5)
    return block.to(dtype).eval()


def make_tokens(dtype: torch.dtype) -> torch.Tensor:
    """[TOKENS, HIDDEN] input rows, the same in every process."""
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8)).to(dtype)


class ShardedBlock:
    """A block whose routed experts are spread over a group; made from the whole block."""

    def __init__(self, block: Any, family: Family, group: mc.Group, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        self.cfg = mc.MoeConfig(
            num_experts=family.num_experts,
            top_k=family.top_k,
            hidden=HIDDEN,
            max_tokens=STEP_TOKENS,
            dispatch_dtype=name,
            combine_dtype=name,
            layout="grouped",
        )
        self.comm = mc.MoeComm(self.cfg, group)
        mine = self.comm.expert_range(group.rank)
        self.gate = block.gate
        self.shared_experts = getattr(block, "shared_experts", None)
        self.gate_up = (
            block.experts.gate_up_proj[mine.start : mine.stop].detach().clone()
        )  # [L, 2F, H]
        self.down = block.experts.down_proj[mine.start : mine.stop].detach().clone()  # [L, H, F]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] of this rank, T up to STEP_TOKENS → [T, H]."""
        _, topk_weights, topk_idx = self.gate(x)
        recv = self.comm.dispatch(x, topk_idx)
        y = self._experts(recv)
        out = self.comm.combine(y, recv.handle, topk_weights=topk_weights)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def _experts(self, recv: mc.Received) -> torch.Tensor:
        """Every local expert over its rows of the grouped layout: y, shaped like recv.x."""
        assert recv.offsets is not None  # only layout="rank" has none
        y = torch.zeros_like(recv.x)
        starts, counts = recv.offsets[:-1].tolist(), recv.counts.tolist()
        experts = zip(self.gate_up, self.down, starts, counts, strict=True)
        for gate_up, down, start, count in experts:
            rows = slice(start, start + count)
            gate, up = linear(recv.x[rows], gate_up).chunk(2, dim=-1)
            y[rows] = linear(silu(gate) * up, down)
        return y


def run_rank(group: mc.Group) -> dict[tuple[str, torch.dtype], float]:
    """Largest difference from the library's block on this rank's tokens, as a share of the
    block's largest output, for every family and dtype."""
    torch.set_num_threads(1)  # the ranks share one machine
    return {
        (name, dtype): largest_difference(group, family, dtype)
        for name, family in FAMILIES.items()
        for dtype in TOLERANCE
    }


def largest_difference(group: mc.Group, family: Family, dtype: torch.dtype) -> float:
    block = make_block(family, dtype)
    sharded = ShardedBlock(block, family, group, dtype)
    steps = steps_of(make_tokens(dtype).tensor_split(group.size)[group.rank], group.size)
    with sharded.comm, torch.no_grad():
        actual = torch.cat([sharded(x) for x in steps]).float()
        # Step by step as well: a router in bfloat16 may choose otherwise in another batch.
        expected = torch.cat([block(x[None])[0] for x in steps if len(x)]).float()
    return float((actual - expected).abs().max() / expected.abs().max())


def steps_of(share: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """Pieces of at most STEP_TOKENS tokens; as many on every rank, the last ones may be empty."""
    count = math.ceil(math.ceil(TOKENS / num_ranks) / STEP_TOKENS)
    return [share[i * STEP_TOKENS : (i + 1) * STEP_TOKENS] for i in range(count)]


def largest_differences(num_ranks: int) -> dict[tuple[str, torch.dtype], float]:
    """The same over all ranks, each in a process of its own."""
    ranks = mc.run(run_rank, num_ranks, device="cpu", timeout_s=300)
    return {case: max(rank[case] for rank in ranks) for case in ranks[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    failed = False
    for num_ranks in parser.parse_args().ranks:
        for (name, dtype), error in largest_differences(num_ranks).items():
            passed = error <= TOLERANCE[dtype]
            failed |= not passed
            print(
                f"{num_ranks} ranks  {name:12} {str(dtype).removeprefix('torch.'):9} "
                f"largest difference {error:.1e} of {TOLERANCE[dtype]:.1e} allowed  "
                f"{'same' if passed else 'DIFFERENT'}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
