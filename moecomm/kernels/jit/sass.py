"""Machine code as text, for tests that look at instructions. Needs NVIDIA's disassembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from moecomm.errors import CompileError

INSTALL: Final = "pip install nvidia-cuda-nvdisasm"
TIMEOUT_S: Final = 120.0
_KERNEL: Final = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)", re.MULTILINE)
_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;")


def disassembler() -> str | None:
    """Return the path of ``nvdisasm``: from its wheel, a CUDA toolkit, or ``PATH``."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return shutil.which("nvdisasm")
    return find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")


def disassemble(cubin: Path) -> dict[str, str]:
    """Return function name → SASS text, one instruction a line ("STG.E.128 [R2.64], R4").

    Raises:
        CompileError: nvdisasm is not installed, or does not accept the file.
    """
    tool = disassembler()
    if tool is None:
        raise CompileError(f"nvdisasm is not installed. Run {INSTALL}")
    done = subprocess.run(
        [tool, "--print-code", str(cubin)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        log = done.stderr or done.stdout
        raise CompileError(f"nvdisasm does not accept {cubin}:\n{log}", log)
    pieces = _KERNEL.split(done.stdout)
    functions = zip(pieces[1::2], pieces[2::2], strict=True)
    return {name: "\n".join(_INSTRUCTION.findall(text)) for name, text in functions}
