"""Arrays that claim to be on a GPU, for rules that must hold before anyone reads them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


class GpuArray:
    """numpy memory behind a DLPack that says "CUDA". bfloat16, which DLPack views refuse, becomes
    float16."""

    def __init__(self, array: np.ndarray, index: int = 0) -> None:
        self.array = array.view(np.float16) if array.dtype == BF16 else array
        self.index = index

    def __dlpack__(self, *, stream: int) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.index)
