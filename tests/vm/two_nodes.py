"""``python tests/vm/two_nodes.py``: two virtual machines on one network, a rank on each, and checks
of the verbs transport between them. Takes one to three minutes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from vm import machine
from vm.image import Image, image
from vm.plugin import compile_for_guest, guest_environment

CHECKS: Final = [
    "a_write_and_its_immediate_land_together",
    "early_arrivals_count",
    "scatter_gives_each_peer_its_slice",
    "random_traffic_is_exact",
]
TIMEOUT_S: Final = 500.0


def main() -> int:
    """Boot both; the worse exit status."""
    compile_for_guest(["test_transport_verbs"], guest_environment(), Path.cwd())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    built = image()
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(_boot, built, node, port) for node in (0, 1)]
        return max(node.result() for node in nodes)


def _boot(built: Image, node: int, port: int) -> int:
    where = "listen" if node == 0 else "connect"
    options = machine.Options(
        cpus=2,
        memory_mib=2048,
        devices=["eth0"],
        network=f"socket,{where}=127.0.0.1:{port}",
        node=node,
        environment=guest_environment(),
    )
    with contextlib.ExitStack() as stack:
        control = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moecomm-vm-")))
        output = stack.enter_context((control / "console").open("wb"))
        command = [sys.executable, "-X", "faulthandler", __file__, "node"]
        try:
            status = machine.boot(built, command, control, output, TIMEOUT_S, options)
        finally:
            text = (control / "console").read_text(errors="replace")
            print("".join(f"node {node}: {line}\n" for line in text.splitlines()))  # noqa: T201
    return status


def rank() -> None:
    """What runs on a node."""
    import test_transport_verbs

    import moecomm as mc
    from moecomm.store import TcpStore

    node = int(socket.gethostname().removeprefix("node"))
    test_transport_verbs.prepare()
    store = TcpStore("10.77.0.1", 29500, serve=node == 0, timeout_s=200.0)
    with store, mc.Group(node, 2, store) as group:
        group.barrier(200.0)
        sizes = {"timeout_s": 100.0}
        seconds = test_transport_verbs.check_all(group, CHECKS, sizes, {})
        group.barrier(60.0)
    for name, took in seconds.items():
        print(f"{took:6.1f} s  {name}", flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:] == ["node"]:
        rank()
    else:
        os.environ.setdefault("PYTHONPATH", os.getcwd())
        sys.exit(main())
