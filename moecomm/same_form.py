"""Whether tensors look like those of the call before, asked of torch in one go.

From one call of a half to the next little but addresses changes. What must be known of a tensor
before kernels may use its address takes seven questions, of 0.04 to 0.1 µs each. ``TensorGuards``,
which torch made to tell whether compiled code may be used again, answers them all, for all tensors
of a call, in 0.1 to 0.2 µs. It is no public part of torch: where it is missing, or lets something
pass that it must not, no form is ever remembered. But of nested tensors it must not be asked: it
asks for their strides, which throws where nothing catches, and the process ends. To find them takes
0.04 µs a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class SameForm:
    """What is known of tensors of one form, for as long as they come in that form.

    The form: whether they are plain tensors, their element types, shapes, strides and device;
    whether one has a gradient to lose or a sign still to be applied. Not their addresses.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._key: object = None
        self._facts: Any = None
        self._check: Callable[..., bool] = _never

    def facts(self, key: object, tensors: tuple[Any, ...]) -> Any:
        """What ``keep`` was given with an equal ``key`` and tensors of this form; ``None`` where
        either differs, or nothing is remembered."""
        if key != self._key:
            return None
        try:
            for tensor in tensors:
                if tensor.is_nested:
                    return None
        except AttributeError:  # no tensor
            return None
        return self._facts if self._check(*tensors) else None

    def keep(self, torch: Any, key: object, facts: Any, tensors: tuple[Any, ...]) -> None:
        """Remember these tensors' form once there are the same ``facts`` twice in a row: with
        sizes that change all the time it would cost more (1.4 µs) than it saves."""
        if (key, facts) != self._seen:
            self._seen = key, facts
        elif _is_trusted(torch):
            self._check = _check_of(torch, tensors)
            self._key, self._facts = key, facts


def _never(*tensors: Any) -> bool:
    return False


def _check_of(torch: Any, tensors: tuple[Any, ...]) -> Callable[..., bool]:
    check: Callable[..., bool] = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


@functools.cache
def _is_trusted(torch: Any) -> bool:
    """Whether this torch's ``TensorGuards`` tells apart all that must be."""
    try:
        with torch.enable_grad():
            plain = torch.zeros(2, 4, device="cpu")
            others = (
                plain[:1], plain[:, :2], plain.view(4, 2), plain[None], plain.view(4, 2).t(),
                plain.int(), plain.clone().requires_grad_(), torch._neg_view(plain),
                plain.to("meta"), plain.to_sparse(),
                torch.nn.Parameter(plain, requires_grad=False), None,
            )  # fmt: skip
            check = _check_of(torch, (plain,))
            return check(plain.clone()) and not any(check(other) for other in others)
    except (AttributeError, TypeError, RuntimeError):  # another torch
        return False
