"""Bundling of device sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moecomm.errors import ConfigError
from moecomm.kernels import source


def _text(name: str, *lines: str) -> str:
    return "\n".join([*lines, f"int {name}_line = __LINE__;", ""])


FILES = {
    "main.cu": _text(
        "main", "// first", '#include "a.cuh"', '#include "b.cuh"', '  #  include  "a.cuh"'
    ),
    "a.cuh": _text(
        "a", "#pragma once", '#include "b.cuh"', "#ifdef NEVER", '#include "d.cuh"', "#endif"
    ),
    "b.cuh": _text(
        "b", "#pragma once", '#include "a.cuh"', '#include "c.cuh"', "#include <stddef.h>"
    ),
    "c.cuh": _text("c", "#pragma once"),
    "d.cuh": _text("d", "#pragma once"),
    "plain.cuh": _text("plain"),
    "late.cu": _text(
        "late",
        "#if 0",
        '#include "c.cuh"',
        "#else",
        '#include "c.cuh"',
        "#endif",
        "#if 1",
        "#endif",
    ),
    "twice.cu": '#include "plain.cuh"\n#include "plain.cuh"\n#include "emulator.hpp"\n',
}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "names", lambda: tuple(FILES))
    monkeypatch.setattr(source, "load", FILES.__getitem__)


def preprocess(text: str | Path, *options: str) -> list[str]:
    """What a C++ compiler makes of a text or file: its lines without blanks and marks."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the tests need a C++ compiler, as the emulator does"
    done = subprocess.run(
        [compiler, "-E", "-P", "-x", "c++", *options, "-" if isinstance(text, str) else text],
        input=text if isinstance(text, str) else "",
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", [n for n in FILES if n != "plain.cuh"])
def test_bundle_means_what_the_includes_mean(name: str, tmp_path: Path) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "emulator.hpp").write_text("int emulator;\n")
    expected = preprocess(tmp_path / name, "-I", str(tmp_path))
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "emulator.hpp").write_text("int emulator;\n")
    bundled = preprocess(source.bundle(name, {}), "-I", str(tmp_path / "beside"))
    assert bundled == expected
    assert any("line = " in line for line in bundled)


@pytest.mark.parametrize("name", [n for n in source.names() if n.endswith(".cu")])
@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_bundle_of_every_source(name: str, target: str, tmp_path: Path) -> None:
    """Same text as with a plain include path, and no file of the package is left to include."""
    package = Path(source.__file__).parent / "cuda"
    (tmp_path / "emulator.hpp").write_text("int emulator;\n")
    options = ["-I", str(tmp_path), *(["-D__CUDACC_RTC__"] if target == "gpu" else [])]
    bundle = source.bundle(name, {"HIDDEN": 64})
    expected = preprocess(package / name, *options, "-I", str(package), "-DHIDDEN=64")
    assert preprocess(bundle, *options) == expected
    for other in source.names():
        assert f'#include "{other}"' not in bundle


@pytest.mark.usefixtures("files")
def test_errors_name_file_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FILES, "c.cuh", "#pragma once\n\n#error here\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        preprocess(source.bundle("main.cu", {"A": 1, "B": 2}))
    assert "c.cuh:3:" in caught.value.stderr
    monkeypatch.setitem(FILES, "c.cuh", "#pragma once\n")
    monkeypatch.setitem(FILES, "main.cu", '#include "a.cuh"\n\n#error here\n')
    with pytest.raises(subprocess.CalledProcessError) as caught:
        preprocess(source.bundle("main.cu", {}))
    assert "main.cu:3:" in caught.value.stderr


@pytest.mark.usefixtures("files")
def test_defines() -> None:
    defines: dict[str, int | str] = {
        "B": 2**63,
        "A": -1,
        "C": "(emu::config()[3])",
        "D": 2**63 - 1,
        "E": True,
    }
    bundle = source.bundle("c.cuh", defines)
    assert bundle.splitlines()[:6] == [
        '#line 1 "defines of c.cuh"',
        "#define A (-1)",
        "#define B 9223372036854775808ull",
        "#define C (emu::config()[3])",
        "#define D 9223372036854775807",
        "#define E 1",
    ]
    assert bundle == source.bundle("c.cuh", dict(reversed(defines.items())))


@pytest.mark.parametrize(
    ("defines", "message"),
    [
        ({"A B": 1}, "a macro name is letters, digits and _"),
        ({"1A": 1}, "a macro name"),
        ({"F(x)": 1}, "a macro name"),
        ({"A": "1\n#include <x>"}, "must be one line"),
    ],
)
@pytest.mark.usefixtures("files")
def test_bad_defines(defines: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source.bundle("c.cuh", defines)


@pytest.mark.parametrize("name", ["none.cu", "../source.py", "", "cuda/common.cuh"])
def test_unknown_source_lists_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"common\.cuh"):
        source.load(name)
