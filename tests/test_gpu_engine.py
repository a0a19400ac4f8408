"""The transfer engine's words shared with a GPU, and where that GPU is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moecomm import cpus, cuda_driver
from moecomm.errors import TransportUnavailable
from moecomm.transport.engine import topology
from moecomm.transport.engine.flags import FLAG_BYTES, Flags

pytestmark = pytest.mark.gpu


def check_words(flags: Flags) -> None:
    assert [flag.value for flag in (flags[0], flags[1], flags[2])] == [0, 0, 0]
    flags[1].value = (1 << 40) + 7
    cuda_driver.synchronize(0)
    seen = cuda_driver.copy_from_device(0, flags[1].device_address, 8)
    assert struct.unpack("<q", seen) == ((1 << 40) + 7,)
    cuda_driver.copy_to_device(0, flags[2].device_address, struct.pack("<q", 99))
    cuda_driver.synchronize(0)
    assert flags[2].value == 99
    assert flags[0].value == 0
    assert flags[1].address - flags[0].address == FLAG_BYTES


def test_host_and_gpu_see_the_same_words_in_pinned_memory() -> None:
    check_words(Flags(3, 0))


@pytest.mark.parametrize("backend", ["gdr", "dmabuf"])
def test_gpu_memory_is_mapped_or_the_reason_given(backend: str) -> None:
    try:
        flags = Flags(3, 0, backend)
    except TransportUnavailable as unavailable:
        error = str(unavailable)
    else:
        check_words(flags)
        return
    assert error.startswith(f"backend='{backend}': ")


def test_the_gpus_place_on_the_pci_bus_is_in_sysfs() -> None:
    address = topology.pci_address_of(0)
    assert len(address.split(":")) == 3
    if (Path("/sys/bus/pci/devices") / address).exists():
        assert topology.cpus_near(address) <= cpus.allowed()
