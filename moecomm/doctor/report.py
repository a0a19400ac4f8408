"""All probes, one after the other, and their result as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moecomm.doctor import (
    compiler,
    efa,
    gpus,
    jit,
    libfabric,
    memory,
    network,
    nvshmem,
    packages,
    rdma,
    storage,
)
from moecomm.doctor.finding import Finding
from moecomm.doctor.transports import Machine, Verdict, conclude


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, in the order in which it is shown."""

    findings: tuple[Finding, ...]
    transports: tuple[Verdict, ...]

    @property
    def cpu_works(self) -> bool:
        """Whether kernels can run in the CPU emulator over loopback."""
        return not any(finding.fatal for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "cpu_works": self.cpu_works,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "transports": [dataclasses.asdict(verdict) for verdict in self.transports],
        }


def examine(stage: Callable[[str], None] = lambda text: None) -> Report:
    """Look at this machine; ``stage`` is told what is being looked at. Raises nothing."""
    stage("Python and packages")
    found = packages.findings(packages.probe())
    stage("C++ compiler")
    found += compiler.findings(compiler.probe())
    found += storage.findings(storage.probe())
    stage("GPU compiler")
    toolchain = jit.probe()
    stage("driver and GPUs")
    devices = gpus.probe()
    stage("NVSHMEM")
    symmetric = nvshmem.probe()
    stage("RDMA and libfabric")
    machine = Machine(
        memory.probe(), devices, toolchain, symmetric, rdma.probe(), libfabric.probe()
    )
    found += memory.findings(machine.memory, has_nic=bool(machine.rdma.devices))
    found += network.findings(network.probe())
    found += jit.findings(toolchain) + gpus.findings(devices)
    found += nvshmem.findings(symmetric, [gpu.arch for gpu in devices.devices])
    found += rdma.findings(machine.rdma) + libfabric.findings(machine.libfabric)
    found += efa.findings(efa.probe(), machine.libfabric)
    return Report(tuple(found), tuple(conclude(machine)))
