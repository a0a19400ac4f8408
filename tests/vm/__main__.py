"""``python tests/vm [options] -- COMMAND``: run a command in a virtual machine with soft-RoCE."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vm import machine  # noqa: E402
from vm.image import image  # noqa: E402
from vm.plugin import guest_environment  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/vm", description=__doc__)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds")
    parser.add_argument("--cpus", type=int, default=machine.Options.cpus)
    parser.add_argument("--rxe", default="lo,dummy0", help="network devices to put soft-RoCE on")
    parser.add_argument("command", nargs="+", help="run in the current folder")
    arguments = parser.parse_args()
    lacking = machine.missing()
    if lacking:
        parser.error(f"missing: {lacking}")
    options = machine.Options(
        cpus=arguments.cpus,
        devices=arguments.rxe.split(","),
        environment=guest_environment() | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )
    with tempfile.TemporaryDirectory(prefix="moecomm-vm-") as control:
        return machine.boot(
            image(),
            arguments.command,
            Path(control),
            sys.stdout.buffer,
            arguments.timeout,
            options,
        )


if __name__ == "__main__":
    sys.exit(main())
