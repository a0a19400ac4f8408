"""The demo's arrays on the device that dispatch and combine run on.

The layer itself is numpy on the host. On a CPU nothing moves; on a GPU rows are copied to torch
tensors before a half and back after it.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moecomm.dtypes import name_of, numpy_dtype, torch_dtype, word_dtype
from moecomm.errors import ConfigError

if TYPE_CHECKING:
    from moecomm.handle import Received

ARRAYS = ("x", "x_scale", "counts", "offsets", "num_rows", "topk_weights", "topk_idx")


class Host:
    """Numpy arrays in, numpy arrays out."""

    def give(self, array: npt.NDArray[Any]) -> Any:
        return array

    def take(self, array: Any) -> npt.NDArray[Any]:
        taken: npt.NDArray[Any] = array
        return taken

    def take_received(self, recv: Received) -> Received:
        return recv

    def wait(self) -> None:
        """All that was launched has ended: on a CPU it has when a half returns."""


class Gpu(Host):
    """Torch tensors on the current GPU. bf16 and fp8 cross as words: numpy's are not torch's."""

    def __init__(self, index: int) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ConfigError("device='cuda': the demo needs torch on a GPU") from error
        self._device = f"cuda:{index}"

    def give(self, array: npt.NDArray[Any]) -> Any:
        name = name_of(array.dtype)
        words = np.ascontiguousarray(array).view(_signed(name))
        tensor = self._torch.from_numpy(words).to(self._device)
        return tensor.view(torch_dtype(self._torch, name))

    def take(self, array: Any) -> npt.NDArray[Any]:
        name = str(array.dtype).removeprefix("torch.")
        word = getattr(self._torch, _signed(name).name)
        words: npt.NDArray[Any] = array.view(word).cpu().numpy()
        return words.view(numpy_dtype(name))

    def take_received(self, recv: Received) -> Received:
        found = {name: getattr(recv, name) for name in ARRAYS}
        taken: dict[str, Any] = {k: self.take(v) for k, v in found.items() if v is not None}
        return replace(recv, **taken)

    def wait(self) -> None:
        self._torch.cuda.synchronize(self._device)


def open_device(device: Any) -> Host:
    """``device`` is ``MoeComm.device``: ``"cpu"``, or ``("cuda", index)``."""
    return Host() if device == "cpu" else Gpu(device[1])


def _signed(name: str) -> np.dtype[Any]:
    """The signed integer (uint8 for one byte) of an element's size; torch knows no others."""
    words = word_dtype(name)
    return np.dtype("u1") if words.itemsize == 1 else np.dtype(f"i{words.itemsize}")
