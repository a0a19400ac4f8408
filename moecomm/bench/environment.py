"""Where and how a measurement was made: enough to make it again."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import moecomm
from moecomm.env import PREFIX

PACKAGES: Final = (
    "numpy", "torch", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-nvjitlink",
    "nvidia-nccl-cu13", "cupy-cuda13x",
)  # fmt: skip
_QUERY: Final = "name,driver_version,memory.total,clocks.max.sm"
_PREFIXES: Final = (PREFIX, "CUDA_", "NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")
_NOT_TOLD: Final = f"{PREFIX}CACHE_DIR"  # where this user keeps things; it changes no figure


def environment() -> dict[str, Any]:
    """Plain values; what cannot be found out is ``None`` or missing."""
    return {
        "moecomm": moecomm.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": _command(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "versions": dict(_versions()),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name != _NOT_TOLD
        },
    }


def _command(words: Sequence[str]) -> str:
    """As typed, but of files their names alone: results are published, folders are this user's."""
    return " ".join([Path(words[0]).name, *(_named(word) for word in words[1:])])


def _named(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if value.startswith(("/", "~", ".")) else value)


def _git(*arguments: str) -> str | None:
    """What git says of the checkout that the package runs from, if it is one."""
    folder = Path(moecomm.__file__).parent.parent
    return _output("git", "-C", str(folder), *arguments)


def _gpus() -> list[dict[str, str]]:
    text = _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader") or ""
    names = _QUERY.split(",")
    return [
        dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False))
        for line in text.splitlines()
    ]


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    return None


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    torch = sys.modules.get("torch")
    if torch is None:
        with contextlib.suppress(ImportError):
            torch = importlib.import_module("torch")
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        assert torch is not None
        yield "NCCL in torch", ".".join(map(str, torch.cuda.nccl.version()))
