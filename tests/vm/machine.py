"""Boot a virtual machine, run one command in it, and say how that ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vm.image import Image

QEMU = "qemu-system-x86_64"
# Programs that are needed here, or by the guest, which shares them; and their Debian packages.
_PROGRAMS = {
    QEMU: "qemu-system-x86",
    "busybox": "busybox-static",
    "rdma": "iproute2",
    "pgrep": "procps",
    "chrt": "util-linux",
}
_DAEMONS = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")  # in Rust; in C, until Debian 12


class MachineFailed(Exception):
    """The machine itself failed: it did not boot, hung, or died. Nothing was tested."""


class MachineHangs(MachineFailed):
    """What runs in the machine did not end in time."""


@dataclass(frozen=True)
class Options:
    """How a machine is made.

    ``devices``: the network devices that get a soft-RoCE device each (rxe0, rxe1 ...).
    ``network``: a connected socket, whose other end is another machine's: what ``eth0`` is plugged
    into. ``node``: its place on that network.
    """

    cpus: int = 4  # with 2, two polling processes and soft-RoCE's softirq are one too many
    memory_mib: int = 3072
    devices: Sequence[str] = ("lo", "dummy0")
    network: socket.socket | None = None
    node: int = 0
    environment: Mapping[str, str] | None = None


def missing() -> str:
    """What this machine lacks to run virtual ones; empty when nothing."""
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        return "a Linux x86_64 machine (the guest shares its programs)"
    lacking = [f"{p} (Debian package {d})" for p, d in _PROGRAMS.items() if not shutil.which(p)]
    if not any(Path("/etc/libibverbs.d").glob("rxe.driver")):
        lacking.append("libibverbs with its soft-RoCE driver (Debian package ibverbs-providers)")
    return ", ".join(lacking)


def boot(
    image: Image,
    command: Sequence[str],
    control: Path,
    console: IO[bytes],
    timeout_s: float,
    options: Options | None = None,
) -> int:
    """Run ``command`` in a machine, in the current folder; its exit status.

    Args:
        control: an empty folder, which the guest sees, and may write to, as ``/control``.
        console: where what it prints goes.

    Raises:
        MachineFailed: the command did not end within ``timeout_s``, or the machine died.
    """
    options = options or Options()
    with contextlib.ExitStack() as stack:
        _write_command(control / "command", command, options.environment or {})
        share = stack.enter_context(_shared_root(control, options.memory_mib))
        arguments = [
            QEMU,
            *_machine(image, options, share.name),
            *share.arguments,
            *_control(control),
        ]
        qemu = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            pass_fds=() if options.network is None else (options.network.fileno(),),
        )
        try:
            qemu.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MachineHangs(f"the machine did not end within {timeout_s:g} s") from None
        finally:
            qemu.kill()
            qemu.wait()
        status = control / "status"
        if not status.exists():
            raise MachineFailed(f"the machine died (QEMU's exit status {qemu.returncode})")
        return int(status.read_text())


@dataclass(frozen=True)
class _Share:
    name: str
    arguments: Sequence[str]


@contextlib.contextmanager
def _shared_root(control: Path, memory_mib: int) -> Iterator[_Share]:
    """This machine's root for the guest: by virtiofs where that is possible, else by 9p, which
    is built into QEMU, needs no root, and takes half as long again."""
    daemon = next((d for d in _DAEMONS if Path(d).exists()), None)
    if daemon is None or os.geteuid() != 0:
        device = "virtio-9p-pci,fsdev=root,mount_tag=root"
        folder = "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"
        yield _Share("9p", ["-fsdev", folder, "-device", device])
        return
    path, log = control / "virtiofs", control / "virtiofs.log"
    options = ["--shared-dir", "/", "--sandbox", "chroot", "--cache", "always"]
    if daemon == _DAEMONS[1]:
        options = ["-f", "-o", "source=/,sandbox=chroot,cache=always,no_writeback"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [daemon, f"--socket-path={path}", *options], stdout=output, stderr=output
        )
    try:
        _wait_for(path, server, log)
        memory = f"memory-backend-memfd,id=memory,size={memory_mib}M,share=on"
        device = "vhost-user-fs-pci,chardev=fs,tag=root,queue-size=1024"
        arguments = ["-object", memory, "-machine", "memory-backend=memory"]
        arguments += ["-chardev", f"socket,id=fs,path={path}", "-device", device]
        yield _Share("virtiofs", arguments)
    finally:
        server.kill()
        server.wait()


def _wait_for(path: Path, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise MachineFailed(f"virtiofsd does not start: {log.read_text()}")
        time.sleep(0.02)


def _machine(image: Image, options: Options, share: str) -> list[str]:
    kernel = "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off random.trust_cpu=on "
    kernel += f"vm.share={share} vm.node={options.node} vm.rxe={','.join(options.devices)}"
    # Not "microvm": without its timers the kernel calibrates the clock wrongly when it is
    # interpreted, and boots hang now and then.
    arguments = ["-M", "pc", "-nodefaults", "-no-user-config", "-no-reboot"]
    arguments += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(options.cpus)]
    arguments += ["-m", str(options.memory_mib), "-display", "none", "-monitor", "none"]
    arguments += ["-serial", "stdio", "-kernel", str(image.kernel)]
    arguments += ["-initrd", str(image.initramfs), "-append", kernel]
    if options.network is not None:
        card = f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{options.node + 1:02x}"
        arguments += ["-netdev", f"socket,id=net,fd={options.network.fileno()}", "-device", card]
    return arguments


def _control(folder: Path) -> list[str]:
    device = "virtio-9p-pci,fsdev=control,mount_tag=control"
    return ["-fsdev", f"local,id=control,path={folder},security_model=none", "-device", device]


def _write_command(file: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [f"cd {shlex.quote(os.getcwd())} || exit 98", f"exec {shlex.join(command)}"]
    file.write_text("\n".join(lines) + "\n")
