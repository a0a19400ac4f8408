"""Compiling device code to cubins: results, reports, cache keys, errors. Needs no GPU."""

from __future__ import annotations

import pickle
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moecomm.cache import Cache
from moecomm.errors import CompileError, ConfigError
from moecomm.kernels import source
from moecomm.kernels.jit import (
    DEFAULT_ARCHS,
    Compiled,
    LinkInput,
    Toolchain,
    check_versions,
    compile_kernel,
    compile_source,
    compiler,
    disassemble,
    disassembler,
    elf,
    fatbin,
    kernel,
    resources,
    toolchain,
)
from moecomm.kernels.jit.toolchain import Library, Version

TINY = 'extern "C" __global__ void tiny(int* p) { *p = 1; }\n'

# A kernel that fits and one that cannot: 64 values a thread in at most 32 registers.
PAIR = """
struct Args { float* out; int stride; const float* in; };
extern "C" __global__ void __launch_bounds__(256) fits(Args a)
{
    __shared__ float tile[256];
    tile[threadIdx.x] = a.in[threadIdx.x];
    __syncthreads();
    a.out[threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) overflows(Args a, int which)
{
    float r[64];
    for (int i = 0; i < 64; i++) r[i] = a.in[i * a.stride + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++) r[i] = r[i] * r[j] + 1;
    a.out[threadIdx.x] = r[which];
    for (int i = 0; i < 64; i++) a.out[i * a.stride + threadIdx.x] = r[i];
}
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


# What comes out


@pytest.mark.parametrize("arch", [*DEFAULT_ARCHS, "sm_90a", "sm_100a", "sm_100f"])
def test_cubin_and_resources(arch: str, cache: Cache) -> None:
    result = compile_source("pair.cu", PAIR, arch, cache=cache)
    code = result.path.read_bytes()
    assert code[:4] == b"\x7fELF"
    assert result.nbytes == len(code)
    assert result.kernels == ("fits", "overflows")
    fits, overflows = result.resources["fits"], result.resources["overflows"]
    assert not fits.spills
    assert (fits.stack_bytes, fits.shared_bytes) == (0, 1024)
    assert 0 < fits.registers <= 255
    assert fits.constant_bytes >= 24  # its arguments
    assert overflows.spills
    assert overflows.registers == 32
    assert overflows.stack_bytes >= 256
    assert overflows.spill_store_bytes > 0
    assert overflows.spill_load_bytes > 0
    assert overflows.constant_bytes == fits.constant_bytes + 4
    assert result.seconds < 60
    assert not result.cached


def test_hit_has_the_report_too(cache: Cache) -> None:
    first = compile_source("pair.cu", PAIR, "sm_90", cache=cache)
    again = compile_source("pair.cu", PAIR, "sm_90", cache=Cache(cache.root))
    assert again.cached
    assert (again.path, again.resources, again.kernels) == (
        first.path,
        first.resources,
        first.kernels,
    )


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_damaged_file_is_compiled_again(suffix: str, cache: Cache) -> None:
    first = compile_source("pair.cu", PAIR, "sm_90", cache=cache)
    [file] = first.path.parent.glob(f"[0-9a-f]*{suffix}")
    file.write_bytes(file.read_bytes()[:-3])
    again = compile_source("pair.cu", PAIR, "sm_90", cache=cache)
    assert not again.cached
    assert again.resources == first.resources
    assert compile_source("pair.cu", PAIR, "sm_90", cache=cache).cached


def test_racing_threads_compile_once(cache: Cache) -> None:
    """G01 through the whole pipeline; processes are in test_cache.py."""
    results: list[Compiled] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(compile_source("t.cu", TINY, "sm_90", cache=cache))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.cached for result in results) == [False] + [True] * 7
    assert len({result.path for result in results}) == 1


def test_linked_function_is_inlined(cache: Cache) -> None:
    """LTO: a function compiled apart leaves no call in the machine code."""
    library = compiler.to_ltoir(
        "scale.cu", 'extern "C" __device__ float scale(float x) { return x * 3; }\n', "sm_90"
    )
    text = (
        'extern "C" __device__ float scale(float);\n'
        'extern "C" __global__ void k(float* p) { *p = scale(*p); }\n'
    )
    link = [LinkInput("scale.ltoir", library)]
    result = compile_source("k.cu", text, "sm_90", link=link, cache=cache)
    assert result.resources["k"].stack_bytes == 0
    assert ".text.scale" not in elf.section_sizes(result.path.read_bytes())
    other = compiler.to_ltoir(
        "scale.cu", 'extern "C" __device__ float scale(float x) { return x * 5; }\n', "sm_90"
    )
    changed = compile_source(
        "k.cu", text, "sm_90", link=[LinkInput("scale.ltoir", other)], cache=cache
    )
    assert changed.path != result.path


@pytest.mark.skipif(disassembler() is None, reason="needs pip install nvidia-cuda-nvdisasm")
def test_disassembly(cache: Cache) -> None:
    code = disassemble(compile_source("pair.cu", PAIR, "sm_90", cache=cache).path)
    assert set(code) == {"fits", "overflows"}
    lines = code["fits"].splitlines()
    assert "BAR.SYNC" in code["fits"]
    assert any(line.startswith("STG.E desc") for line in lines)
    assert not any(line.startswith("CALL") for line in lines)
    assert any(line.startswith("STL") for line in code["overflows"].splitlines())


# Cache keys (G04)


def _key(**changes: object) -> str:
    loaded = Toolchain.load()
    values: dict[str, object] = {
        "name": "t.cu",
        "text": TINY,
        "arch": "sm_90",
        "link": (),
        "toolchain": loaded,
        **changes,
    }
    return kernel.cubin_key(**values)  # type: ignore[arg-type]


def _newer(library: Library) -> Library:
    return Library(library.name, library.version, library.path, "13.0.99")


def test_key_covers_source_arch_link_and_compiler() -> None:  # G04
    loaded = Toolchain.load()
    parts = (loaded.nvvm, loaded.cuda_core, loaded.cuda_bindings, loaded.archs)
    keys = [
        _key(),
        _key(text=TINY + " "),
        _key(arch="sm_90a"),
        _key(link=(LinkInput("a.ltoir", b"1"),)),
        _key(link=(LinkInput("a.ltoir", b"2"),)),
        _key(link=(LinkInput("a.a", b"1"),)),
        _key(toolchain=Toolchain(_newer(loaded.nvrtc), loaded.nvjitlink, *parts)),
        _key(toolchain=Toolchain(loaded.nvrtc, _newer(loaded.nvjitlink), *parts)),
    ]
    assert len(set(keys)) == len(keys)
    assert _key() == keys[0]


@pytest.mark.parametrize("options", ["_COMPILE", "_LINK"])
def test_key_covers_flags(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setitem(getattr(compiler, options), "lineinfo", True)
    assert _key() != before


def test_key_covers_package_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setattr(kernel, "__version__", "99.0")
    assert _key() != before


def test_key_covers_headers_and_defines(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """G04."""
    files = {"k.cu": '#include "h.cuh"\n' + TINY, "h.cuh": "#pragma once\n"}
    monkeypatch.setattr(source, "names", lambda: tuple(files))
    monkeypatch.setattr(source, "load", files.__getitem__)
    first = compile_kernel("k.cu", {"A": 1}, "sm_90", cache=cache)
    assert compile_kernel("k.cu", {"A": 1}, "sm_90", cache=cache).cached
    assert not compile_kernel("k.cu", {"A": 2}, "sm_90", cache=cache).cached
    files["h.cuh"] = "#pragma once\n// edited\n"
    edited = compile_kernel("k.cu", {"A": 1}, "sm_90", cache=cache)
    assert not edited.cached
    assert edited.path != first.path


# Errors


def test_error_names_file_and_line(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"k.cu": '\n#include "h.cuh"\n', "h.cuh": "#pragma once\n\nint wrong = nothing;\n"}
    monkeypatch.setattr(source, "names", lambda: tuple(files))
    monkeypatch.setattr(source, "load", files.__getitem__)
    with pytest.raises(CompileError) as caught:
        compile_kernel("k.cu", {}, "sm_90", cache=cache)
    error = caught.value
    assert "k.cu does not compile for sm_90" in str(error)
    assert 'h.cuh(3): error: identifier "nothing" is undefined' in error.log
    assert error.source_path is not None
    assert Path(error.source_path).read_text() == source.bundle("k.cu", {})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.log, copy.source_path) == (str(error), error.log, error.source_path)


def test_link_error_names_the_symbol(cache: Cache) -> None:
    text = 'extern "C" __device__ void absent(); extern "C" __global__ void k() { absent(); }'
    with pytest.raises(CompileError, match="k.cu does not link for sm_90[^$]*absent"):
        compile_source("k.cu", text, "sm_90", cache=cache)


@pytest.mark.parametrize("arch", ["sm_35", "sm_80a", "sm_90f", "sm_90b", "90", "compute_90", ""])
def test_unknown_arch_lists_the_known_ones(arch: str, cache: Cache) -> None:
    """G09."""
    with pytest.raises(ConfigError, match=r"arch='.*NVRTC.*sm_80, .*sm_90, sm_90a, sm_100"):
        compile_source("t.cu", TINY, arch, cache=cache)


def test_archive_without_code_for_the_arch(tmp_path: Path, cache: Cache) -> None:
    """G09: the error has the path and what is in the file."""
    archive = tmp_path / "libdevice.a"
    archive.write_bytes(b"!<arch>\n" + fat_binary((2, 80), (2, 90), (1, 90)))
    with pytest.raises(CompileError) as caught:
        compile_source("t.cu", TINY, "sm_100", link=[LinkInput(str(archive))], cache=cache)
    assert f"{archive} holds code for sm_80, compute_90, sm_90" in str(caught.value)


@pytest.mark.parametrize("name", ["lib.so", "/nonexistent/lib.a"])
def test_bad_link_input(name: str, cache: Cache) -> None:
    with pytest.raises(CompileError, match=f"link input {name}: must end in|{name} cannot be read"):
        compile_source("t.cu", TINY, "sm_90", link=[LinkInput(name)], cache=cache)


def test_no_compile(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    with pytest.raises(CompileError, match="t.cu for sm_90 is not compiled yet.*NO_COMPILE"):
        compile_source("t.cu", TINY, "sm_90", cache=cache)
    monkeypatch.delenv("MOECOMM_NO_COMPILE")
    compile_source("t.cu", TINY, "sm_90", cache=cache)
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    assert compile_source("t.cu", TINY, "sm_90", cache=cache).cached


# The toolchain


def test_toolchain_is_found() -> None:
    loaded = Toolchain.load()
    assert loaded.nvjitlink.version >= loaded.nvrtc.version
    assert set(DEFAULT_ARCHS) <= set(loaded.arch_names())
    for library in (loaded.nvrtc, loaded.nvjitlink):
        assert Path(library.path).is_file()
        assert str(library.version.major) in loaded.identity()


@pytest.mark.parametrize(
    ("nvjitlink", "nvrtc", "nvvm", "fits"),
    [
        ((13, 0), (13, 0), None, True),
        ((13, 5), (13, 0), (13, 0), True),
        ((13, 0), (13, 5), None, False),
        ((13, 0), (13, 0), (13, 5), False),  # what `pip install torch numba-cuda-mlir` gives
        ((13, 10), (13, 9), (13, 9), True),
        ((12, 9), (13, 0), None, False),
    ],
)
def test_nvjitlink_must_not_be_older(
    nvjitlink: tuple[int, int],
    nvrtc: tuple[int, int],
    nvvm: tuple[int, int] | None,
    fits: bool,
) -> None:
    linker = Library("nvJitLink", Version(*nvjitlink), "/lib/libnvJitLink.so")
    inputs = [Library("NVRTC", Version(*nvrtc))]
    inputs += [Library("NVVM", Version(*nvvm), release="13.5.37")] if nvvm else []
    if fits:
        check_versions(linker, *inputs, None)
        return
    with pytest.raises(CompileError) as caught:
        check_versions(linker, *inputs, None)
    release = f"{nvjitlink[0]}.{nvjitlink[1]}.*"
    assert f'"nvidia-cuda-nvrtc=={release}" "nvidia-nvjitlink=={release}"' in str(caught.value)
    assert "/lib/libnvJitLink.so" in str(caught.value)
    if nvvm == (13, 5):
        assert "NVVM 13.5.37" in str(caught.value)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r'cuda.bindings.*pip install "moecomm\[cuda13\]"'):
        toolchain._find()


@pytest.mark.parametrize("library", ["nvrtc", "nvJitLink"])
def test_missing_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder as pathfinder

    real: Callable[[str], object] = pathfinder.load_nvidia_dynamic_lib

    def load(name: str) -> object:
        if name == library:
            raise pathfinder.DynamicLibNotFoundError(f'"lib{name}.so.13" not found')
        return real(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    with pytest.raises(CompileError, match=rf'lib{library}.*pip install "moecomm\[cuda13\]"'):
        toolchain._find()


def test_missing_disassembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("moecomm.kernels.jit.sass.disassembler", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(tmp_path / "x.cubin")


# Readers of binary formats


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """A fat binary of (kind, architecture) entries: kind 2 machine code, 1 PTX."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, 16, 0, 0, 8, 1, arch).ljust(64 + 16, b"\0")
        for kind, arch in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_archs_of_a_fat_binary() -> None:
    assert fatbin.archs(b"") == fatbin.archs(b"nothing here") == []
    data = b"junk" + fat_binary((2, 90), (1, 90)) + b"junk" + fat_binary((2, 100), (2, 80))
    assert fatbin.archs(data) == ["sm_80", "compute_90", "sm_90", "sm_100"]
    for cut in range(len(data)):
        fatbin.archs(data[:cut])  # no exception, no endless loop
    assert fatbin.archs(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 2**63) + bytes(200)) == []


def test_elf_reader_refuses_what_is_cut_short(cache: Cache) -> None:
    code = compile_source("t.cu", TINY, "sm_90", cache=cache).path.read_bytes()
    sections = elf.section_sizes(code)
    assert elf.kernel_names(sections) == ("tiny",)
    assert sections[".text.tiny"] > 0
    for data in (b"", code[:10], code[:100], code[: len(code) // 2], b"x" * 1000):
        with pytest.raises(CompileError, match="not a whole ELF file"):
            elf.section_sizes(data)


def test_report_counts_called_functions() -> None:
    log = """ptxas info    : 0 bytes gmem, 128 bytes cmem[3]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 96 bytes cumulative stack size, 8+40 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Function properties for helper
ptxas         .     80 bytes stack frame, 32 bytes spill stores, 64 bytes spill loads
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    found = resources.parse_report(log, {".nv.constant0.k": 360})
    assert found == {
        "k": resources.Resources(40, 96, 36, 72, 48, 360),
        "other": resources.Resources(12, 0, 0, 0, 0, 0),
    }
    assert found["k"].spills
    assert not found["other"].spills


def test_kernel_without_a_report_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "parse_report", lambda log, sections: {})
    compiled = compile_source("t.cu", TINY, "sm_90", cache=Cache(tmp_path))
    with pytest.raises(CompileError, match=r"t\.cu for sm_90: .* reports nothing about tiny"):
        compiled.require_report()


def test_importing_needs_no_toolchain() -> None:
    import subprocess

    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in ("cuda", "cupy", "torch"))
    code = f"import sys; {blocked}; import moecomm.kernels.jit; import moecomm.kernels.source"
    subprocess.run([sys.executable, "-c", code], check=True)
