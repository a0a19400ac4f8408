"""MoeConfig refuses early, and says which field, which value and which rule."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from moecomm.config import MoeConfig
from moecomm.errors import ConfigError

GOOD: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 16}
FP8: dict[str, Any] = {**GOOD, "dispatch_dtype": "float8_e4m3fn", "scale_block": 128}

REFUSED = [
    ("num_experts", 0, "1 to 2048"),
    ("num_experts", 2049, "1 to 2048"),
    ("num_experts", 8.0, "integer"),
    ("num_experts", True, "integer"),
    ("top_k", 0, "1 to 32"),
    ("top_k", 33, "1 to 32"),
    ("hidden", 0, "from 1"),
    ("hidden", -64, "from 1"),
    ("hidden", "64", "integer"),
    ("max_tokens", 0, "from 1"),
    ("max_tokens", None, "integer"),
    ("max_recv_tokens", 0, "from 1"),
    ("expert_alignment", 0, "from 1"),
    ("replicas", 0, "from 1"),
    ("in_flight", 0, "from 1"),
    ("num_sms", 0, "from 1"),
    ("timeout_s", 0, "above 0"),
    ("timeout_s", -1.0, "above 0"),
    ("timeout_s", float("nan"), "above 0"),
    ("timeout_s", "30", "number"),
    ("timeout_s", True, "number"),
    ("dispatch_dtype", "float64", "float8_e4m3fn"),
    ("dispatch_dtype", "float8_e5m2", "float8_e4m3fn"),
    ("combine_dtype", "float8_e4m3fn", "bfloat16"),
    ("layout", "expert", "grouped"),
    ("reduce", "both", "sender"),
    ("scale_pow2", 1, "True or False"),
    ("check_values", None, "True or False"),
]


@pytest.mark.parametrize(
    ("field", "value", "rule"), REFUSED, ids=[f"{f}={v!r}" for f, v, _ in REFUSED]
)
def test_bad_field_is_named_with_value_and_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MoeConfig(**{**GOOD, field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize("block", [0, 1, 8, 48, 100, 1024, "128", 128.5])
def test_scale_block_must_be_listed(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"scale_block=.*must be one of 16, 32"):
        MoeConfig(**{**FP8, "scale_block": block})


def test_more_slots_than_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k=4.*num_experts=2"):
        MoeConfig(num_experts=2, top_k=4, hidden=64, max_tokens=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale_block": 128}, "only dispatch_dtype='float8_e4m3fn' has scales"),
        ({"dispatch_dtype": "float8_e4m3fn", "scale_pow2": True}, "scale_pow2=True: needs"),
        ({"expert_alignment": 8}, "expert_alignment=8: only layout='grouped'"),
        ({"expert_alignment": 8, "layout": "rank"}, "not 'rank'"),
        ({"layout": "rank", "reduce": "sender"}, "reduce='sender': layout='rank'"),
    ],
    ids=["scales-without-fp8", "pow2-without-scales", "align-batched", "align-rank", "rank-sender"],
)
def test_combinations_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MoeConfig(**{**GOOD, **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize("hidden", [1, 16, 200, 1536, 2048, 2880, 3584, 4096, 6144, 7168, 8192])
def test_any_hidden_size(hidden: int) -> None:
    assert MoeConfig(**{**GOOD, "hidden": hidden}).num_scales == 0
    assert MoeConfig(**{**FP8, "hidden": hidden}).num_scales == (hidden + 127) // 128


@pytest.mark.parametrize(("hidden", "scales"), [(1, 1), (128, 1), (129, 2), (200, 2), (2880, 23)])
def test_last_scale_block_may_be_partial(hidden: int, scales: int) -> None:
    assert MoeConfig(**{**FP8, "hidden": hidden}).num_scales == scales


@pytest.mark.parametrize("max_tokens", [1, 67, 672])
@pytest.mark.parametrize("top_k", [1, 9, 10, 11, 12, 16, 22, 32])
def test_odd_limits_are_accepted(max_tokens: int, top_k: int) -> None:
    MoeConfig(num_experts=2048, top_k=top_k, hidden=64, max_tokens=max_tokens)


def test_weights_travel_only_when_the_sender_reduces() -> None:
    assert not MoeConfig(**GOOD).weights_travel
    assert MoeConfig(**GOOD, reduce="sender").weights_travel


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        MoeConfig(8, 2, 64, 16)  # type: ignore[misc]


def test_frozen_equal_hashable_picklable() -> None:
    cfg = MoeConfig(**FP8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.top_k = 3  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(cfg))
    assert again == cfg
    assert hash(again) == hash(cfg)
    assert copy.deepcopy(cfg) == cfg


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="top_k=9"):
        dataclasses.replace(MoeConfig(**GOOD), top_k=9)
