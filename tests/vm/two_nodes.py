"""``python tests/vm/two_nodes.py``: two virtual machines on one network; between them MoE exchanges
of four ranks, two on each, then checks of the transfer engine, of a rank on each. Takes two to four
minutes; with ``exchange`` or ``engine`` behind it, half of that."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
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
PARTS: Final = {"exchange": "vm.across", "engine": "test_transport_verbs"}  # → what to compile
TIMEOUT_S: Final = 500.0


def run(parts: Sequence[str]) -> tuple[int, str]:
    """Boot both; the worse exit status, and what they printed."""
    compile_for_guest([PARTS[part] for part in parts], guest_environment(), Path.cwd())
    built = image()
    first, second = socket.socketpair()
    with first, second, ThreadPoolExecutor(2) as pool:
        plugs = enumerate((first, second))
        nodes = [pool.submit(_boot, built, node, plug, parts) for node, plug in plugs]
        ends = [node.result() for node in nodes]
    return max(status for status, _ in ends), "".join(text for _, text in ends)


def _boot(built: Image, node: int, plug: socket.socket, parts: Sequence[str]) -> tuple[int, str]:
    options = machine.Options(
        cpus=2,
        memory_mib=2048,
        devices=["eth0"],
        network=plug,
        node=node,
        environment=guest_environment(),
    )
    with contextlib.ExitStack() as stack:
        control = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moecomm-vm-")))
        output = stack.enter_context((control / "console").open("wb"))
        command = [sys.executable, "-X", "faulthandler", __file__, "node", *parts]
        said, status = "", 1
        try:
            status = machine.boot(built, command, control, output, TIMEOUT_S, options)
        except machine.MachineFailed as error:
            said = f"{error}\n"
        said = (control / "console").read_text(errors="replace") + said
    return status, "".join(f"node {node}: {line}\n" for line in said.splitlines())


def on_node(parts: Sequence[str]) -> None:
    """What runs on a machine."""
    node = int(socket.gethostname().removeprefix("node"))
    started = time.monotonic()
    if "exchange" in parts:
        from forked import run_forked

        from vm import across

        for said in run_forked(across.rank, across.RANKS_A_NODE, node, timeout_s=TIMEOUT_S):
            print(said or "killed", flush=True)  # noqa: T201
    if "engine" in parts:
        _check_engine(node)
    print(f"{time.monotonic() - started:.1f} s in all", flush=True)  # noqa: T201


def _check_engine(node: int) -> None:
    import test_transport_verbs

    import moecomm as mc
    from moecomm.store import TcpStore

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
    if sys.argv[1:2] == ["node"]:
        on_node(sys.argv[2:])
    else:
        status, text = run(sys.argv[1:] or list(PARTS))
        print(text)  # noqa: T201
        sys.exit(status)
