"""The timeline tool's clocks go into every kernel; reading them needs a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecomm.kernels import source
from moecomm.kernels.jit import compile_kernel
from moecomm.kernels.stages import variants

FILE = Path(__file__).parent.parent / "bench" / "timeline.py"


@pytest.fixture(scope="module")
def timeline() -> Any:
    spec = importlib.util.spec_from_file_location("timeline", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("label", ["fp8 rank", "fp8 flags"])
def test_kernels_with_clocks_compile(
    label: str, timeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = source.load
    monkeypatch.setattr(source, "load", lambda name: timeline.with_clock(name, plain(name)))
    chosen = {v.stage: v for v in variants() if v.label == label and v.stage != "release"}
    assert len(chosen) == 4
    for variant in chosen.values():
        compiled = compile_kernel(variant.source, variant.defines, "sm_90")
        assert compiled.kernels == (variant.kernel,)
        assert b"block_clock" in compiled.path.read_bytes()


def test_a_line_says_when_blocks_ran(timeline: Any) -> None:
    words = np.array([[1000, 5000, 2000, 7], [2000, 9000, 2000, 7], [3000, 7000, 2000, 8]])
    line = timeline.summary("combine_send", words, 1000)
    assert line.split() == [
        "combine_send", "3", "2", "0.0", "1.0", "1.8", "2.0", "4.0", "6.0", "7.6", "8.0",
        *["1.0"] * 4,
    ]  # fmt: skip
