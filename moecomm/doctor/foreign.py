"""Questions to foreign libraries, asked in a process of their own.

Loading a driver or a fabric library can hang on sick hardware, crash, print, or start threads.
None of that may take the doctor with it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 30.0

# Question → function that answers with plain JSON values. Run in the child only.
_QUESTIONS: Final = {
    "gpus": "moecomm.doctor.cuda_driver:describe",
    "libfabric": "moecomm.doctor.libfabric:list_providers",
    "nvshmem": "moecomm.doctor.nvshmem:host_version",
    "shared": "moecomm.doctor.memory:write_shared",
}


_CHILD: Final = (
    "import sys; from moecomm.doctor.foreign import answer; answer(sys.argv[1], sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The child gave no answer; ``why`` is one line."""

    why: str


def ask(question: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Any | Failure:
    """Return the answer of one question, or why there is none."""
    command = [sys.executable, "-c", _CHILD, question, *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return Failure(f"no answer within {timeout_s:.0f} s")
    except OSError as error:
        return Failure(str(error))
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # a library may have printed before
    return Failure(_reason(done.returncode, done.stderr))


def _reason(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if code < 0:
        return f"crashed with signal {-code}" + (f": {lines[-1]}" if lines else "")
    return lines[-1] if lines else f"exit code {code}"


def answer(question: str, arguments: list[str]) -> None:
    """In the child: write the answer as the last line of stdout."""
    module, function = _QUESTIONS[question].split(":")
    result = getattr(importlib.import_module(module), function)(*arguments)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
