"""Fixtures and hardware markers shared by all tests.

A test marked ``gpu``, ``gpus(n)``, ``nic`` or ``archive`` is skipped where that is missing, and the
reason names what is missing; ``nic`` tests run in a virtual machine instead, where there can be one
(see ``vm/plugin.py``). ``MOECOMM_TEST_STRICT=1`` turns those skips into failures, for a
machine that is meant to have everything.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import processes
import pytest
from hypothesis import HealthCheck, settings
from vm import plugin as guest

from moecomm.errors import TransportUnavailable
from moecomm.kernels.nvshmem_link import find_copy

# Examples start processes' worth of emulated kernels: a busy machine is no reason to fail. In CI
# the same examples each time, so that a red run repeats.
settings.register_profile(
    "moecomm",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("moecomm")


@cache
def _gpu_count() -> tuple[int, str]:
    """CUDA devices here, and what is missing when there are none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "no CUDA driver (libcuda.so.1)"
    if driver.cuInit(0) != 0:
        return 0, "the CUDA driver does not start (cuInit failed)"
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return 0, "the CUDA driver sees no device"
    if not _importable("cuda.core"):
        return 0, "Python package cuda-core (pip install 'moecomm[cuda13]')"
    return count.value, ""


@cache
def _nic_missing() -> str:
    """What an RDMA test lacks here; empty when nothing."""
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return "no RDMA device in /sys/class/infiniband"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs.so.1 (Debian package libibverbs1)"
    return ""


@cache
def _archive_missing() -> str:
    """Why kernels cannot be linked with NVSHMEM here; empty when they can."""
    try:
        find_copy()
    except TransportUnavailable as error:
        return str(error)
    return ""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _missing_for(item: pytest.Item) -> str:
    wanted = 1 if item.get_closest_marker("gpu") else 0
    several = item.get_closest_marker("gpus")
    if several is not None:
        wanted = max(wanted, int(several.args[0]))
    if wanted:
        found, why = _gpu_count()
        if found < wanted:
            return f"needs {wanted} GPU(s), found {found}: {why or 'too few devices'}"
    if item.get_closest_marker("nic") and _nic_missing() and guest.missing():
        return f"needs an RDMA NIC ({_nic_missing()}), or {guest.missing()}"
    if item.get_closest_marker("archive") and _archive_missing():
        return _archive_missing()
    return ""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _nic_missing() and not guest.missing():
        guest.replace_items(items)
    if config.pluginmanager.hasplugin("xdist"):  # -n 2 --dist loadgroup
        for item in items:
            if item.get_closest_marker("xdist_group") is not None:
                continue
            in_guest = isinstance(item, guest.GuestItem)
            item.add_marker(pytest.mark.xdist_group("guest" if in_guest else item.path.name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = _missing_for(item)
    if not missing:
        return
    if os.environ.get("MOECOMM_TEST_STRICT") == "1":
        pytest.fail(f"{missing} (MOECOMM_TEST_STRICT=1 forbids this skip)", pytrace=False)
    if item.get_closest_marker("nic") and guest.mode() == "required":
        pytest.fail(f"{missing} (MOECOMM_TEST_VM=required forbids this skip)", pytrace=False)
    pytest.skip(missing)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same seed in every test, so that a failure repeats."""
    return np.random.default_rng(20260)


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of this test alone; its folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """The CPU's buffers start as NaN: whoever reads what nobody wrote is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMM_POISON", "1")
        yield


@pytest.fixture(params=["straight", "bounce"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without and with a bounce: whether the network reaches what the kernels work on."""
    monkeypatch.setenv("MOECOMM_BOUNCE", str(int(request.param == "bounce")))


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test ends with no process, thread or descriptor more than before."""
    mark = processes.new_mark()
    monkeypatch.setenv(processes.VARIABLE, mark)
    threads, descriptors = threading.active_count(), processes.descriptors()
    yield
    if sys.platform == "linux":
        assert processes.wait_until_gone(mark) == []
    assert threading.active_count() == threads
    assert processes.descriptors() == descriptors
