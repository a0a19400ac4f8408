"""Building programs: which compiler, errors that can be read, what the cache keys on."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
from emulator_programs import KERNELS, program

from moecomm.emulator import EmulatorProgram, ProcessWorld
from moecomm.emulator.build import DEVICE_HEADERS, build_program, find_compiler, include_dir
from moecomm.errors import CompileError, ConfigError

SOURCE = 'extern "C" __global__ void empty() {}\n'


def test_kernels_are_found_in_the_text() -> None:
    text = """
    // extern "C" __global__ void in_a_comment(Args a) {}
    /* extern "C" __global__ void in_another(Args a) {} */
    #define MAKE(name) extern "C" __global__ void name(Args a) \\
        { extern "C" __global__ void in_a_macro(Args a); }
    struct Args { u64 x; };
    extern "C" __global__ void first(Args a) {}
    extern "C" __global__
    void __launch_bounds__(128, 2) second(const Args a)
    {}
    """
    built = EmulatorProgram(text, name="two")
    assert built.kernels == ("first", "second")
    with ProcessWorld(built) as world:
        world.launch("second", bytes(8), 1, 32)
    with pytest.raises(ConfigError, match="source has no"):
        EmulatorProgram("int x;")


def test_a_source_that_does_not_compile_is_kept(cold_cache: Path) -> None:
    text = 'extern "C" __global__ void broken() { undeclared_thing(); }\n'
    with pytest.raises(CompileError) as caught:
        EmulatorProgram(text, name="broken_program").prepare()
    error = caught.value
    assert "undeclared_thing" in str(error)
    assert "broken_program" in str(error)
    assert "undeclared_thing" in error.log
    assert error.source_path is not None
    kept = Path(error.source_path)
    assert text in kept.read_text()
    assert pickle.loads(pickle.dumps(error)).source_path == error.source_path
    assert kept.is_relative_to(cold_cache)  # the same failure again leaves no second one


def test_errors_name_the_line_of_the_original_file(cold_cache: Path) -> None:
    text = f'#line 1 "mine.cu"\n{SOURCE}int x = nothing;\n'
    with pytest.raises(CompileError, match=r"mine\.cu:2"):
        EmulatorProgram(text).prepare()


def test_a_frame_that_no_stack_holds_is_refused(cold_cache: Path) -> None:
    text = """
    struct Args { volatile float* out; };
    extern "C" __global__ void big(Args a)
    {
        volatile float rows[100000];
        for (int i = 0; i < 100000; ++i) rows[i] = a.out[i];
        a.out[0] = rows[threadIdx.x];
    }
    """
    with pytest.raises(CompileError, match="frame"):
        EmulatorProgram(text, name="big").prepare()


def test_no_compiler(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("MOECOMM_CXX", raising=False)
    with pytest.raises(CompileError, match=r"Install one: .*MOECOMM_CXX"):
        EmulatorProgram(SOURCE).prepare()


@pytest.mark.parametrize("variable", ["MOECOMM_CXX", "CXX"])
def test_a_chosen_compiler(
    variable: str, cold_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOECOMM_CXX", raising=False)
    monkeypatch.setenv(variable, "/nonexistent/c++ --option")
    with pytest.raises(CompileError, match="'/nonexistent/c\\+\\+'"):
        EmulatorProgram(SOURCE).prepare()
    monkeypatch.setenv(variable, "c++ -DCHOSEN=1")
    assert find_compiler() == ("c++", "-DCHOSEN=1")
    EmulatorProgram(SOURCE + 'static_assert(CHOSEN, "");\n').prepare()


def test_compiling_can_be_forbidden(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    with pytest.raises(CompileError, match="emulator program mine"):
        EmulatorProgram(SOURCE, name="mine").prepare()


def test_what_the_cache_keys_on(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # G04
    text = '#include "emulator.hpp"\n' + SOURCE
    first = build_program(text, "p", checks=False)
    assert build_program(text, "other name", checks=False) == first
    different = [
        build_program(text, "p", checks=True),
        build_program(text + "\n", "p", checks=False),
    ]
    monkeypatch.setenv("MOECOMM_CXX", f"{find_compiler()[0]} -DX")
    different.append(build_program(text, "p", checks=False))
    assert len({first, *different}) == 4


def _compilers() -> list[str]:
    return [c for c in ("g++", "clang++") if shutil.which(c)]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("checks", [0, 1])
def test_headers_compile_without_warnings(compiler: str, checks: int, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    text = "".join((KERNELS / f"{n}.cu").read_text() for n in ("primitives",))
    source = tmp_path / "all.cpp"
    source.write_text('#include "emulator.hpp"\n' + text)
    command = [
        compiler, "-std=c++17", "-O2", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror",
        f"-DMOECOMM_EMULATOR_CHECKS={checks}", "-I", str(include_dir()),
    ]  # fmt: skip
    for file in (source, include_dir() / "runtime.cpp"):
        ran = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_every_device_header_is_in_the_key() -> None:
    """A program is rebuilt when a header changes that it can see."""
    text = (include_dir() / "emulator.hpp").read_text()
    seen, todo = set(), ["emulator.hpp"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        text = (include_dir() / name).read_text()
        todo += [line.split('"')[1] for line in text.splitlines() if line.startswith('#include "')]
    assert seen == set(DEVICE_HEADERS)


def test_the_program_needs_nothing_of_the_runtime() -> None:
    """No undefined symbol but libc's and libm's: it is loaded by itself."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    source = '#include "emulator.hpp"\n' + program("primitives").source
    path = build_program(source, "primitives", checks=True)
    ran = subprocess.run([nm, "-D", "-u", str(path)], capture_output=True, text=True, check=True)
    assert "emu" not in ran.stdout
    assert os.path.getsize(path) < 1 << 20
