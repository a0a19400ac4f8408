"""What importing loads: numpy alone, and a backend that is missing is explained when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("ml_dtypes", "numba", "torch", "cuda", "cupy", "typer", "rich", "transformers")

# An import hook that hides packages, as on a machine where they are not installed.
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=set(hidden)) + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_import_loads_numpy_alone() -> None:  # G10
    shown = run("import json, moecomm; print(json.dumps(sorted(sys.modules)))")
    assert shown.returncode == 0, shown.stderr
    loaded = {name.partition(".")[0] for name in json.loads(shown.stdout)}
    assert not loaded & set(HEAVY)


def test_everything_but_launching_works_with_numpy_alone() -> None:
    code = """
import numpy as np
import moecomm as mc
cfg = mc.MoeConfig(num_experts=4, top_k=1, hidden=8, max_tokens=4,
                   dispatch_dtype="float32", combine_dtype="float32")
mc.Layout(cfg, 2, 0).symmetric.nbytes
xs = [np.ones((4, 8), np.float32)] * 2
idx = [np.arange(4)[:, None]] * 2
recv = mc.reference.dispatch(cfg, 2, xs, idx)
out = mc.reference.combine(cfg, 2, [r.x for r in recv], idx, [np.ones((4, 1), np.float32)] * 2)
assert (out[0] == 1).all()
mc.Group, mc.MoeComm, mc.run
"""
    shown = run(code, hidden=HEAVY)
    assert shown.returncode == 0, shown.stderr


def test_a_dtype_without_its_package_names_the_package() -> None:
    code = """
import moecomm as mc
from moecomm.dtypes import numpy_dtype
try:
    numpy_dtype("bfloat16")
except mc.ConfigError as error:
    print(error)
"""
    shown = run(code, hidden=("ml_dtypes",))
    assert shown.returncode == 0, shown.stderr
    assert "ml_dtypes" in shown.stdout


@pytest.mark.parametrize("transport", ["nvshmem", "verbs", "efa"])
def test_a_transport_that_is_not_here_is_explained_on_use(transport: str) -> None:  # G10
    code = f"""
import os
import moecomm as mc
from moecomm.emulator import simulate
os.environ["MOECOMM_NODE_SIZE"] = "1"
def call(group):
    mc.MoeComm(mc.MoeConfig(num_experts=2, top_k=1, hidden=16, max_tokens=2), group, {transport!r})
try:
    simulate(call, 2)
except mc.TransportUnavailable as error:
    print(error)
"""
    shown = run(code)
    assert shown.returncode == 0, shown.stderr
    assert transport in shown.stdout
