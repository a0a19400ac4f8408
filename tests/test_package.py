"""The package's own names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moecomm


def test_every_exported_name_is_there() -> None:
    for name in moecomm.__all__:
        assert getattr(moecomm, name) is not None, name
    assert dir(moecomm) == sorted(moecomm.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = moecomm.nothing


@pytest.mark.parametrize(
    "imports",
    [
        "import moecomm as mc",
        "import moecomm as mc; mc.run; import moecomm.run",
        "import moecomm.run; import moecomm as mc",
        "from moecomm.run import outcomes; import moecomm as mc",
    ],
)
def test_run_is_the_function_whatever_was_imported_first(imports: str) -> None:
    code = f"{imports}; assert mc.run.__name__ == 'run' and mc.run.__qualname__ == 'run'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
