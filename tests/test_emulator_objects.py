"""Programs of the emulator that are linked with object files made elsewhere."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from moecomm.emulator import CheckFailure, EmulatorProgram, ProcessWorld, simulate
from moecomm.emulator.build import build_object
from moecomm.group import Group

KERNELS = """
struct Args { unsigned long long out; unsigned long long limit; };
extern "C" void elsewhere(unsigned long long out, unsigned long long limit);
extern "C" void store(unsigned long long at, int value)
{
    emu::note_caller(__builtin_return_address(0));
    st(reinterpret_cast<int*>(at), value);
}
extern "C" void refuse(const char* what) { emu::self()->api->fail(emu::self(), what); }
extern "C" unsigned thread() { return threadIdx.x; }
extern "C" __global__ void run(Args a) { elsewhere(a.out, a.limit); }
"""
ELSEWHERE = """
extern "C" void store(unsigned long long at, int value);
extern "C" void refuse(const char* what);
extern "C" unsigned thread();
extern "C" void elsewhere(unsigned long long out, unsigned long long limit)
{
    if (thread() >= limit) refuse("too many threads");
    store(out + 4 * thread() * (limit != 77), 10 + (int)thread());
    asm volatile("");  // the call is not the last thing, which would make it a jump
}
"""


def program() -> EmulatorProgram:
    return EmulatorProgram(
        KERNELS, name="linked", objects=lambda: [build_object(ELSEWHERE, "elsewhere")]
    )


def test_code_from_elsewhere_is_called_and_calls() -> None:
    out = np.zeros(64, np.int32)
    with ProcessWorld(program()) as world:
        world.launch("run", struct.pack("=QQ", out.ctypes.data, 64), 1, 64)
    assert out.tolist() == list(range(10, 74))


def test_it_may_end_the_run() -> None:
    out = np.zeros(64, np.int32)
    with ProcessWorld(program()) as world:
        with pytest.raises(CheckFailure, match="thread 9: too many threads") as caught:
            world.launch("run", struct.pack("=QQ", out.ctypes.data, 9), 1, 10)
        world.launch("run", struct.pack("=QQ", out.ctypes.data, 64), 1, 64)  # and goes on
    assert caught.value.kind == "kernel error"


def test_reports_name_the_caller() -> None:
    """Two threads write the same word. Both places are in the object file, which has no lines, and
    not in the function that it called."""
    with pytest.raises(CheckFailure, match="is not ordered after the write") as caught:
        simulate(_race, 1)
    assert "linked.cpp" not in caught.value.report


def _race(group: Group) -> None:
    out = np.zeros(64, np.int32)
    simulation = group.simulation
    assert simulation is not None
    simulation.register(0, out.ctypes.data, out.nbytes, "local", "out")
    simulation.launch(0, program(), [], "run", struct.pack("=QQ", out.ctypes.data, 77), 1, 2)
