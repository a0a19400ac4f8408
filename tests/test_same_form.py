"""Tensors' form is remembered from the second call on, and only by a torch that can be trusted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecomm import same_form
from moecomm.same_form import SameForm


@pytest.fixture
def asked_anew() -> Iterator[None]:
    same_form._is_trusted.cache_clear()
    yield
    same_form._is_trusted.cache_clear()


def taught(key: object = "key", times: int = 2) -> SameForm:
    same = SameForm()
    for _ in range(times):
        same.keep(torch, key, "facts", (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32)))
    return same


def test_a_form_is_remembered_the_second_time() -> None:
    tensors = torch.ones(3, 4), torch.ones(3, dtype=torch.int32)
    for times, facts in enumerate([None, None, "facts", "facts"]):
        assert taught(times=times).facts("key", tensors) == facts


def test_forms_that_take_turns_are_not_remembered() -> None:
    same = SameForm()
    tensors = torch.zeros(3, 4), torch.zeros(4, 4)
    for _ in range(3):
        for rows, tensor in enumerate(tensors):
            same.keep(torch, "key", rows, (tensor,))
            assert same.facts("key", (tensor,)) is None


def test_the_last_form_is_the_one() -> None:
    same = taught()
    for _ in range(2):
        same.keep(torch, "other", "more", (torch.zeros(5),))
    assert same.facts("other", (torch.ones(5),)) == "more"
    assert same.facts("key", (torch.ones(3, 4), torch.ones(3, dtype=torch.int32))) is None


@pytest.mark.parametrize(
    "others",
    [
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4, 3).t(), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 4, dtype=torch.complex64).imag, torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 4, device="meta"), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 4), None),
        (torch.zeros(3, 4).to_mkldnn(), torch.zeros(3, dtype=torch.int32)),
        (3, "no tensor"),
    ],
)
def test_what_differs_is_not_the_same(others: tuple[Any, Any]) -> None:
    assert taught().facts("key", others) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("which", [0, 1])
def test_a_nested_tensor_does_not_end_the_process(which: int) -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32)]
    assert taught().facts("key", tuple(tensors)) == "facts"
    tensors[which] = torch.nested.nested_tensor([tensors[which]])
    assert taught().facts("key", tuple(tensors)) is None


def test_a_form_belongs_to_its_key() -> None:
    tensors = torch.ones(3, 4), torch.ones(3, dtype=torch.int32)
    assert taught((True, 3)).facts((True, 3), tensors) == "facts"
    assert taught((True, 3)).facts((False, 3), tensors) is None


def test_a_tensor_is_looked_at_anew_when_it_changes_in_place() -> None:
    same, ids = taught(), torch.ones(3, dtype=torch.int32)
    tensor = torch.ones(3, 4)
    assert same.facts("key", (tensor, ids)) == "facts"
    assert same.facts("key", (tensor.requires_grad_(), ids)) is None
    assert same.facts("key", (tensor.requires_grad_(False), ids)) == "facts"
    tensor.data = torch.ones(4, 3).t()
    assert same.facts("key", (tensor, ids)) is None
    tensor.data = torch.ones(4, 3)
    assert same.facts("key", (tensor, ids)) is None


def test_no_tensor_is_held() -> None:
    same, tensor = SameForm(), torch.ones(3, 4)
    for _ in range(3):
        same.keep(torch, "key", "facts", (tensor,))
    assert same.facts("key", (tensor,)) == "facts"
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


class _Lax:
    """Lets everything pass."""

    def __init__(self, *tensors: Any, **sizes: Any) -> None: ...

    def check(self, *tensors: Any) -> bool:
        return True


class _Blind(_Lax):
    def check(self, *tensors: Any) -> bool:
        return False


class _Older(_Lax):
    def __init__(self, *tensors: Any) -> None: ...


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("guards", [_Lax, _Blind, _Older, None])
def test_a_torch_that_cannot_tell_is_not_asked(
    guards: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guards is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)
    tensors = torch.ones(3, 4), torch.ones(3, dtype=torch.int32)
    assert taught(times=5).facts("key", tensors) is None
