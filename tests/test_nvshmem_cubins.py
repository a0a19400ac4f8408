"""Kernels that put with NVSHMEM, compiled and linked with its device archive, without a GPU."""

from __future__ import annotations

import pytest
from cubins import check_registers

import moecomm as mc
from moecomm.errors import CompileError
from moecomm.kernels.geometry import gpu_block
from moecomm.kernels.jit import LinkInput, compile_kernel, compile_source, elf
from moecomm.kernels.nvshmem_link import Copy, archive_version, check_versions, find_copy
from moecomm.kernels.stages import STAGES, gpu_defines, input_codes, kernel_name
from moecomm.remote import Remote

pytestmark = pytest.mark.archive

CFG = mc.MoeConfig(num_experts=256, top_k=8, hidden=7168, max_tokens=128)
LAYOUT = mc.Layout(CFG, 16, 0, Remote(mode="nvshmem", chunk=2))
SENDING = ("dispatch_send", "combine_send")  # an sm_100 link takes seconds
CASES = [("sm_90", stage) for stage in STAGES]
CASES += [(arch, stage) for arch in ("sm_80", "sm_100") for stage in SENDING]


@pytest.mark.parametrize(("arch", "stage"), CASES)
def test_kernel(arch: str, stage: str) -> None:
    copy = find_copy()
    defines = gpu_defines(LAYOUT, stage, input_codes(CFG)[0] if stage == "dispatch_send" else 0)
    name = kernel_name(LAYOUT, stage)
    compiled = compile_kernel(f"{name}.cu", defines, arch, link=copy.link)
    assert compiled.kernels == (name,)
    check_registers(compiled, name, gpu_block(stage, LAYOUT))
    # What NVSHMEM's host library looks up and fills in.
    code = compiled.path.read_bytes()
    assert elf.symbol_bytes(code, "nvshmemi_device_state_d") is not None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_archive_says_which_version_it_is(arch: str) -> None:
    copy = find_copy()
    assert archive_version(copy, arch) == copy.headers
    check_versions(copy, arch, copy.headers)


def test_a_mismatch_of_the_host_library_names_all_three() -> None:
    copy = find_copy()
    with pytest.raises(mc.TransportUnavailable) as caught:
        check_versions(copy, "sm_90", (3, 8, 0))
    text = ".".join(map(str, copy.headers))
    assert f"headers {text} and archive {text} in {copy.root}, host library 3.8.0" in str(
        caught.value
    )


def test_an_archive_without_code_for_the_gpu_is_refused() -> None:
    with pytest.raises(mc.TransportUnavailable, match="does not link for sm_103"):
        check_versions(find_copy(), "sm_103", (3, 4, 5))


def test_kernels_do_not_link_without_the_archive() -> None:
    with pytest.raises(CompileError, match="nvshmemi_transfer"):
        compile_kernel("release.cu", gpu_defines(LAYOUT, "release", 0), "sm_90")


def test_symbols_that_are_not_there() -> None:
    compiled = compile_source("empty.cu", 'extern "C" __global__ void empty() {}', "sm_90")
    code = compiled.path.read_bytes()
    assert elf.symbol_bytes(code, "nvshmemi_device_lib_version_d") is None
    with pytest.raises(CompileError, match="not a whole ELF file"):
        elf.symbol_bytes(code[:100], "anything")


def test_copies_are_looked_for_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert find_copy() != Copy(tmp_path, (3, 4, 5))  # it is empty
    (tmp_path / "include/non_abi").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvshmem_device.a").write_bytes(b"")
    lines = [f"#define NVSHMEM_VENDOR_{n}_VERSION {v}" for n, v in
             (("MAJOR", 3), ("MINOR", 9), ("PATCH", 1))]  # fmt: skip
    (tmp_path / "include/non_abi/nvshmem_version.h").write_text("\n".join(lines))
    copy = find_copy()
    assert copy == Copy(tmp_path, (3, 9, 1))
    assert copy.link == (LinkInput(str(tmp_path / "lib/libnvshmem_device.a")),)
