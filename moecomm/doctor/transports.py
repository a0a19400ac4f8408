"""Which transports can be used here, and why: the conclusion from all probes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moecomm.doctor import nvshmem
from moecomm.doctor.finding import size_text
from moecomm.doctor.gpus import Gpus, can_launch, can_use_peers
from moecomm.doctor.jit import Jit
from moecomm.doctor.libfabric import Libfabric
from moecomm.doctor.memory import LOCKED_NEED, Memory
from moecomm.doctor.nvshmem import Nvshmem
from moecomm.doctor.rdma import Rdma

NAMES: Final = ("loopback", "nvlink", "nvshmem", "verbs", "efa")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the probes found, as far as transports depend on it."""

    memory: Memory
    gpus: Gpus
    jit: Jit
    nvshmem: Nvshmem
    rdma: Rdma
    libfabric: Libfabric


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one transport can be used; ``why`` is one line either way."""

    name: str
    usable: bool
    why: str


def has_module(name: str) -> bool:
    """Whether this version of moecomm has the transport."""
    return importlib.util.find_spec(f"moecomm.transport.{name}") is not None


def conclude(machine: Machine, included: Callable[[str], bool] = has_module) -> list[Verdict]:
    """Return one verdict for each transport, in the order of ``NAMES``."""
    judges = {
        "loopback": _loopback,
        "nvlink": _nvlink,
        "nvshmem": _nvshmem,
        "verbs": _verbs,
        "efa": _efa,
    }
    return [_judge(name, judges[name](machine), included) for name in NAMES]


def _judge(name: str, verdict: tuple[bool, str], included: Callable[[str], bool]) -> Verdict:
    usable, why = verdict
    if included(name):
        return Verdict(name, usable, why)
    return Verdict(name, False, f"not in this version of moecomm (this machine: {why})")


def choice(verdicts: list[Verdict]) -> str:
    """Return one line: what ``transport="auto"`` can come to on this machine, by device."""
    usable = [verdict.name for verdict in verdicts if verdict.usable]
    return ", ".join(usable) if usable else "none"


def _loopback(machine: Machine) -> tuple[bool, str]:
    if machine.memory.refusal is not None:
        return False, f"processes cannot share memory: {machine.memory.refusal}"
    return True, f"processes of this machine share memory ({machine.memory.shared})"


def _gpu_ready(machine: Machine) -> str | None:
    """Why no kernel can be compiled for and run on a GPU here; ``None`` when one can."""
    return can_launch(machine.gpus) or machine.jit.error


def _nvlink(machine: Machine) -> tuple[bool, str]:
    why = _gpu_ready(machine) or can_use_peers(machine.gpus)
    if why is not None:
        return False, why
    count = len(machine.gpus.devices)
    return True, "one GPU: several ranks share it" if count == 1 else f"{count} GPUs, all peers"


def _nvshmem(machine: Machine) -> tuple[bool, str]:
    why = _gpu_ready(machine)
    chosen = machine.nvshmem.chosen
    if why is None and chosen is None:
        why = "no whole copy of NVSHMEM"
    if why is None:
        why = machine.nvshmem.conflict
    if why is None and chosen is not None:
        lacks = (nvshmem.lacks_arch(chosen, gpu.arch) for gpu in machine.gpus.devices)
        why = next(filter(None, lacks), None)
    if why is not None or chosen is None:
        return False, why or ""
    version = ".".join(map(str, chosen.device or ()))
    if machine.rdma.gpu_initiated:
        return True, f"NVSHMEM {version}; between nodes the GPU posts to a ConnectX itself (IBGDA)"
    if machine.rdma.why_not() is None:
        return True, (
            f"NVSHMEM {version}; between nodes by a CPU proxy: no ConnectX, which alone lets the "
            "GPU post by itself (IBGDA)"
        )
    return True, f"NVSHMEM {version}, inside this machine only ({machine.rdma.why_not()})"


def _verbs(machine: Machine) -> tuple[bool, str]:
    rdma = machine.rdma
    why = rdma.why_not(("ConnectX", "soft-RoCE"))
    if rdma.library_error is not None:
        why = f"libibverbs does not load ({rdma.library_error})" + (f"; {why}" if why else "")
    if why is not None:
        return False, why
    low = _low_limit(machine.memory)
    if low is not None:
        return False, low
    return True, "; ".join(str(device) for device in rdma.devices if device.usable)


def _efa(machine: Machine) -> tuple[bool, str]:
    copy = machine.libfabric.with_provider("efa")
    if copy is not None:
        low = _low_limit(machine.memory)
        return (False, low) if low else (True, f"provider efa of {copy.path}")
    stand_in = machine.libfabric.with_provider("tcp")
    if stand_in is None:
        return False, "no libfabric with the provider efa or tcp"
    why = machine.rdma.why_not(("AWS EFA",)) or "libfabric does not open the EFA device"
    return True, f"for tests, over provider tcp of {stand_in.path}: {why}"


def _low_limit(memory: Memory) -> str | None:
    if memory.locked is None or memory.locked >= LOCKED_NEED:
        return None
    return (
        f"the limit on locked memory is {size_text(memory.locked)}, "
        f"about {size_text(LOCKED_NEED)} is needed"
    )
