"""Driver, GPUs, MIG, peer access and NVLink fabric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moecomm.cuda_driver import NOT_READY
from moecomm.doctor import foreign
from moecomm.doctor.finding import Finding, absent, bad, ok, size_text
from moecomm.doctor.foreign import Failure

TOPIC: Final = "GPU"
MIN_CUDA: Final = (13, 0)
MIN_ARCH: Final = 80
_SICK_FABRIC: Final = ("not started", "in progress")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as CUDA numbers them. ``fabric``: its NVLink fabric state, if it has one."""

    name: str
    arch: str
    memory: int  # bytes
    multiprocessors: int
    posix_handles: bool
    rdma: bool
    fabric: str | None

    @property
    def number(self) -> int:
        """Compute capability as one number: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def is_mig(self) -> bool:
        """Whether this is a slice of a GPU (MIG)."""
        return " MIG " in f"{self.name} "


@dataclass(frozen=True, slots=True)
class Gpus:
    """``cuda``: newest CUDA release that the driver supports; ``None``: no working driver.

    ``closed_pairs``: ordered pairs (a, b) where a cannot access the memory of b.
    """

    cuda: tuple[int, int] | None = None
    driver: str | None = None
    devices: tuple[Gpu, ...] = ()
    closed_pairs: tuple[tuple[int, int], ...] = ()
    error: str | None = None
    error_code: int = 0


def probe(ask: Callable[[str], Any] = foreign.ask) -> Gpus:
    """Ask the driver, in a process of its own."""
    answer = ask("gpus")
    if isinstance(answer, Failure):
        return Gpus(error=answer.why)
    if "error" in answer:
        return Gpus(error=answer["error"], error_code=answer["code"])
    if not answer:
        return Gpus()
    return Gpus(
        cuda=(answer["cuda"][0], answer["cuda"][1]),
        driver=answer["driver"],
        devices=tuple(map(_gpu, answer["devices"])),
        closed_pairs=tuple((a, b) for a, b in answer["no_peer_access"]),
    )


def _gpu(device: dict[str, Any]) -> Gpu:
    return Gpu(
        name=device["name"],
        arch=f"sm_{device['major']}{device['minor']}",
        memory=device["memory"],
        multiprocessors=device["multiprocessors"],
        posix_handles=bool(device["posix_handles"]),
        rdma=bool(device["rdma"]),
        fabric=device["fabric"],
    )


def findings(gpus: Gpus) -> list[Finding]:
    if gpus.error is not None:
        return [_broken_driver(gpus)]
    if gpus.cuda is None:
        return [absent(TOPIC, "driver", "no libcuda.so.1: kernels run in the CPU emulator")]
    found = [_driver(gpus)]
    if not gpus.devices:
        found.append(absent(TOPIC, "devices", "the driver shows no GPU to this process"))
    found += [_device(number, gpu) for number, gpu in enumerate(gpus.devices)]
    if len(gpus.devices) > 1:
        found.append(_peer_access(gpus))
    return found


def _broken_driver(gpus: Gpus) -> Finding:
    detail = f"libcuda.so.1 does not start: {gpus.error}"
    if gpus.error_code == NOT_READY:
        detail += ": the NVLink fabric is not up"
        return bad(TOPIC, "driver", detail, "systemctl start nvidia-fabricmanager (as root)")
    return bad(TOPIC, "driver", detail)


def _driver(gpus: Gpus) -> Finding:
    assert gpus.cuda is not None
    text = f"{gpus.driver or 'version unknown'}, CUDA {gpus.cuda[0]}.{gpus.cuda[1]}"
    if gpus.cuda < MIN_CUDA:
        return bad(TOPIC, "driver", f"{text}: CUDA 13.0 is needed", "install driver 580 or newer")
    return ok(TOPIC, "driver", text)


def _device(number: int, gpu: Gpu) -> Finding:
    parts = [gpu.name, gpu.arch, size_text(gpu.memory), f"{gpu.multiprocessors} SMs"]
    if gpu.is_mig:
        parts.append("MIG slice: no peer access, host memory only")
    if gpu.fabric is not None:
        parts.append(f"fabric {gpu.fabric}")
    text = ", ".join(parts)
    if gpu.number < MIN_ARCH:
        return bad(TOPIC, f"GPU {number}", f"{text}: kernels need sm_{MIN_ARCH} or newer")
    if gpu.fabric in _SICK_FABRIC:
        # Mapping peers over a half-started fabric asks for absurd sizes or hangs.
        return bad(TOPIC, f"GPU {number}", text, "systemctl restart nvidia-fabricmanager (as root)")
    return ok(TOPIC, f"GPU {number}", text)


def _peer_access(gpus: Gpus) -> Finding:
    if not gpus.closed_pairs:
        return ok(TOPIC, "peer access", f"all {len(gpus.devices)} GPUs reach each other")
    pairs = ", ".join(f"{a}→{b}" for a, b in gpus.closed_pairs)
    if any(gpu.is_mig for gpu in gpus.devices):
        return absent(TOPIC, "peer access", f"not between MIG slices: {pairs}")
    return absent(TOPIC, "peer access", f"missing between GPUs {pairs}")


def can_launch(gpus: Gpus) -> str | None:
    """Why no kernel can run on a GPU here; ``None`` when it can on all of them."""
    if gpus.error is not None:
        return f"the driver does not start: {gpus.error}"
    if gpus.cuda is None:
        return "no NVIDIA driver"
    if not gpus.devices:
        return "no GPU"
    if gpus.cuda < MIN_CUDA:
        return f"the driver supports CUDA {gpus.cuda[0]}.{gpus.cuda[1]}, 13.0 is needed"
    old = [n for n, gpu in enumerate(gpus.devices) if gpu.number < MIN_ARCH]
    return f"GPU {old[0]} is older than sm_{MIN_ARCH}" if old else None


def can_use_peers(gpus: Gpus) -> str | None:
    """Why GPUs here cannot map each other's memory; ``None`` when they can."""
    for number, gpu in enumerate(gpus.devices):
        if gpu.is_mig:
            return f"GPU {number} is a MIG slice, which has no peer access"
        if gpu.fabric in _SICK_FABRIC:
            return f"the NVLink fabric of GPU {number} is {gpu.fabric!r}, not 'completed'"
        if not gpu.posix_handles:
            return f"GPU {number} cannot share memory through file descriptors"
    if gpus.closed_pairs:
        pairs = ", ".join(f"{a}→{b}" for a, b in gpus.closed_pairs)
        return f"no peer access between GPUs {pairs}"
    return None
