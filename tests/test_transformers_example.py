"""The example with the MoE blocks of three model families, run as a user would run it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'moecomm[test]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'moecomm[test]'")

EXAMPLES = Path(__file__).parents[1] / "examples"
FAMILIES = ("DeepSeek-V3", "Mixtral", "Qwen3-MoE")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module; on sys.path, so that the ranks' processes can import it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("transformers_moe")


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n}-ranks")
def differences(request: pytest.FixtureRequest, example: Any) -> dict[tuple[str, Any], float]:
    found: dict[tuple[str, Any], float] = example.largest_differences(request.param)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_block_gives_the_librarys_output(
    differences: dict[tuple[str, Any], float], example: Any, family: str, dtype: str
) -> None:
    torch_dtype = getattr(torch, dtype)
    assert differences[family, torch_dtype] <= example.TOLERANCE[torch_dtype]


def test_every_family_has_ranks_with_unequal_numbers_of_experts(example: Any) -> None:
    assert set(example.FAMILIES) == set(FAMILIES)
    assert all(family.num_experts % 4 for family in example.FAMILIES.values())


def test_a_wrong_expert_is_noticed(example: Any) -> None:
    """The tolerance is far below the effect of mixing up two experts."""
    family = example.FAMILIES["Mixtral"]
    block, x = example.make_block(family, torch.float32), example.make_tokens(torch.float32)
    with torch.no_grad():
        right = block(x[None])[0]
        block.experts.down_proj[[0, 1]] = block.experts.down_proj[[1, 0]]
        wrong = block(x[None])[0]
    difference = float((wrong - right).abs().max() / right.abs().max())
    assert difference > 10 * max(example.TOLERANCE.values())
