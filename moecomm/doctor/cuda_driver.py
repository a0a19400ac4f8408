"""The NVIDIA driver asked through ctypes: nothing but ``libcuda`` and ``libnvidia-ml``.

Runs in a child process (see ``foreign``). Makes no context: only attributes are read.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

ATTRIBUTES: Final = {
    "multiprocessors": 16,
    "major": 75,
    "minor": 76,
    "posix_handles": 103,
    "rdma": 116,
    "dma_buf": 124,
    "fabric_handles": 128,
}
_FABRIC_STATES: Final = ("not supported", "not started", "in progress", "completed")


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = [
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def describe() -> dict[str, Any]:
    """Return the driver's version, its GPUs and the ordered pairs without peer access.

    ``{"error": text, "code": n}`` when the driver is there and does not work; ``{}`` without one.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    version = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version))
    if code:
        return {"error": _error_name(cuda, code), "code": code}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = [_device(cuda, ordinal) for ordinal in range(count.value)]
    _add_fabric_states(devices)
    return {
        "cuda": [version.value // 1000, version.value % 1000 // 10],
        "driver": _driver_release(),
        "devices": devices,
        "no_peer_access": _closed_pairs(cuda, count.value),
    }


def _error_name(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


def _device(cuda: Any, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    name, bus_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    memory = ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetPCIBusId(bus_id, len(bus_id), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return {
        "name": name.value.decode(),
        "bus_id": bus_id.value.decode(),
        "memory": memory.value,
        "fabric": None,
        **{key: _attribute(cuda, device, number) for key, number in ATTRIBUTES.items()},
    }


def _attribute(cuda: Any, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    code = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return 0 if code else value.value  # an older driver does not know the newest ones


def _closed_pairs(cuda: Any, count: int) -> list[list[int]]:
    closed = []
    for a in range(count):
        for b in range(count):
            can = ctypes.c_int()
            code = cuda.cuDeviceCanAccessPeer(ctypes.byref(can), a, b) if a != b else 0
            if a != b and (code or not can.value):
                closed.append([a, b])
    return closed


def _driver_release() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as stream:
            words = stream.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _add_fabric_states(devices: list[dict[str, Any]]) -> None:
    """Fill in what the fabric manager says of each GPU, where NVML is there and new enough."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        get_info = nvml.nvmlDeviceGetGpuFabricInfo
    except (OSError, AttributeError):
        return
    if nvml.nvmlInit_v2():
        return
    for device in devices:
        handle, info = ctypes.c_void_p(), _FabricInfo()
        bus_id = device["bus_id"].encode()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
            continue
        if get_info(handle, ctypes.byref(info)) == 0 and info.state < len(_FABRIC_STATES):
            device["fabric"] = _FABRIC_STATES[info.state]
    nvml.nvmlShutdown()
