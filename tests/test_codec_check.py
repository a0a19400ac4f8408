"""The comparison that runs on a GPU, with a driver whose launches run in the emulator."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from codec_examples import Int8PerToken, Steps16, Truncated

import moecomm as mc
from moecomm.emulator import EmulatorProgram, ProcessWorld
from moecomm.kernels import codec_check, coding, source


class Driver:
    """Enough of ``cuda.bindings.driver``; its code is that of ``codec``."""

    def __init__(self, codec: mc.Codec) -> None:
        names = coding.address_names()
        defines = coding.check_defines(codec)
        defines |= {name: f"(emu::config()[{i}])" for i, name in enumerate(names)}
        program = EmulatorProgram(source.bundle("codec_check.cu", defines), name="codec_check")
        self.world = ProcessWorld(program, coding.addresses(codec))
        self.memory: dict[int, Any] = {}
        self.modules = 0
        self.launches = 0

    def cuModuleLoad(self, path: bytes) -> tuple[int, int]:
        self.modules += 1
        return 0, 7

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, bytes]:
        return 0, name

    def cuModuleUnload(self, module: int) -> tuple[int]:
        self.modules -= 1
        return (0,)

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        buffer = (ctypes.c_char * nbytes)()
        self.memory[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cuLaunchKernel(self, function: bytes, *rest: Any) -> tuple[int]:
        gx, gy, gz, bx, by, bz, shared, stream, params, extra = rest
        assert (gy, gz, by, bz, stream, extra) == (1, 1, 1, 1, 0, 0)
        args = ctypes.c_void_p.from_address(params).value
        assert args is not None
        blob = ctypes.string_at(args, ctypes.sizeof(codec_check.CheckArgs))
        self.world.launch(function.decode(), blob, gx, bx, shared)
        self.launches += 1
        return (0,)


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``driver_of(codec)``: from now on the GPU has that codec's code, whatever is loaded."""

    def install(codec: mc.Codec) -> Driver:
        driver = Driver(codec)

        @contextlib.contextmanager
        def current(index: int) -> Iterator[Driver]:
            yield driver

        monkeypatch.setattr(codec_check, "current", current)
        return driver

    def to_device(index: int, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def from_device(index: int, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    monkeypatch.setattr(codec_check, "copy_to_device", to_device)
    monkeypatch.setattr(codec_check, "copy_from_device", from_device)
    codec_check._check_on_gpu.cache_clear()
    yield install
    codec_check._check_on_gpu.cache_clear()


@pytest.mark.parametrize("codec", [Int8PerToken, Steps16, Truncated], ids=str)
def test_the_right_code_passes(codec: mc.Codec, driver_of: Any) -> None:
    driver = driver_of(codec)
    codec_check.check_on_gpu(codec, 0, "sm_90")
    codec_check.check_on_gpu(codec, 0, "sm_90")  # once a process
    assert driver.launches == len(codec.functions())
    assert (driver.modules, driver.memory) == (0, {})


def _halves_up(value, inverse):
    q = max(-127.0, min(127.0, value * inverse))
    return int(q + 0.5) if q > 0.0 else int(q - 0.5)


def test_other_code_is_an_error_and_nothing_stays(driver_of: Any) -> None:
    wrong = mc.Codec(
        "Wrong", "int8", None, _halves_up, Int8PerToken.decode, Int8PerToken.scale,
        Int8PerToken.inverse,
    )  # fmt: skip
    driver = driver_of(wrong)
    with pytest.raises(mc.CodecError, match=r"Int8PerToken: encode\(.*when compiled for sm_90: m"):
        codec_check.check_on_gpu(Int8PerToken, 0, "sm_90")
    assert (driver.modules, driver.memory) == (0, {})
