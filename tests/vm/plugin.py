"""Tests marked ``nic`` on a machine without an RDMA device: all of them run in one virtual machine,
and each is reported here as if it had run here.

``MOECOMM_TEST_VM``: ``auto`` (without it): in a virtual machine where that is possible, else
skipped; ``required``: fail where it is not; ``off``: skipped.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from vm import machine
from vm.image import cache_folder, image

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0  # against hangs; on two idle processors it takes a minute and a half
_NO_END = "it did not end"
_TESTS = Path(__file__).parents[1]


def mode() -> str:
    return os.environ.get("MOECOMM_TEST_VM") or "auto"


def missing() -> str:
    """Why tests cannot run in a virtual machine; empty when they can."""
    if mode() == "off":
        return "a virtual machine, which MOECOMM_TEST_VM=off forbids"
    lacking = machine.missing()
    return lacking and f"a virtual machine with soft-RoCE, for which this one lacks {lacking}"


class GuestItem(pytest.Item):
    """Stands for a test that runs in the guest."""

    def runtest(self) -> None:
        guest = Guest.of(self.session)
        result = guest.result(test_name(self))
        self.add_report_section("call", "guest", f"{result.seconds:.2f} s in the guest")
        if result.outcome == "skipped":
            pytest.skip(result.text)
        if result.outcome != "passed":
            raise GuestFailure(result.text)

    def repr_failure(self, excinfo, style=None):  # type: ignore[no-untyped-def]
        if isinstance(excinfo.value, GuestFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def test_name(item: pytest.Item) -> str:
    """As pytest in the guest has it: without the group that pytest-xdist adds."""
    return item.nodeid.removesuffix("@guest")


class GuestFailure(Exception):
    """A test failed in the guest; its text is the report from there."""


@dataclass(frozen=True)
class Result:
    outcome: str
    seconds: float
    text: str


def replace_items(items: list[pytest.Item]) -> None:
    """Let the guest run the tests of ``items`` that are marked ``nic``."""
    for place, item in enumerate(items):
        if item.get_closest_marker("nic") is None:
            continue
        stand_in = GuestItem.from_parent(item.parent, name=item.name, nodeid=item.nodeid)
        stand_in.own_markers = item.own_markers
        stand_in.keywords.update(item.keywords)
        items[place] = stand_in


class Guest:
    """The one run of all of a session's guest tests; starts when the first result is wanted."""

    _key = pytest.StashKey["Guest"]()

    def __init__(self, session: pytest.Session) -> None:
        self._root = session.config.rootpath
        self._tests = [test_name(item) for item in session.items if isinstance(item, GuestItem)]
        self._results: dict[str, Result] | None = None
        self._results_so_far: dict[str, Result] = {}
        self._why_not = ""

    @classmethod
    def of(cls, session: pytest.Session) -> Guest:
        return session.config.stash.setdefault(cls._key, cls(session))

    def result(self, test: str) -> Result:
        if self._results is None:
            faulthandler.cancel_dump_traceback_later()  # this test takes as long as all of them
            self._results = self._run()
        return self._results.get(test) or Result("failed", 0.0, self._why_not)

    def _run(self) -> dict[str, Result]:
        environment = guest_environment()
        modules = sorted({Path(test.split("::")[0]).stem for test in self._tests})
        compile_for_guest(modules, environment, self._root)
        for _ in range(2):
            try:
                return self._boot(environment)
            except machine.MachineHangs as error:
                self._why_not = f"{error}\n{self._why_not}"
                return self._results_so_far
            except machine.MachineFailed as error:  # no test of ours does that: once more
                logger.warning("%s", error)
                self._why_not = f"{error}\n{self._why_not}"
        return self._results_so_far

    def _boot(self, environment: dict[str, str]) -> dict[str, Result]:
        # The machine's own virtual memory is where it is slow: one process imports all, and
        # plugins of other packages stay out.
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "--noconftest"]
        command += ["-p", "no:cacheprovider", "-p", "vm.report", "-o", "addopts="]
        command += ["--report-file", "/control/report", *self._tests]
        with tempfile.TemporaryDirectory(prefix="moecomm-vm-") as folder:
            control = Path(folder)
            options = machine.Options(environment=environment)
            console = control / "console"
            with console.open("wb") as output:
                try:
                    machine.boot(image(), command, control, output, TIMEOUT_S, options)
                finally:
                    text = console.read_text(errors="replace")
                    self._why_not = f"the guest ended without its result:\n{text[-8000:]}"
                    report = control / "report"
                    lines = report.read_text().splitlines() if report.exists() else []
                    self._results_so_far = _results(lines)
        return self._results_so_far


def compile_for_guest(modules: Sequence[str], environment: dict[str, str], root: Path) -> None:
    """What test modules compile when they are imported, or by their ``prepare()``, is compiled
    here: many times faster.

    Raises:
        GuestFailure: they cannot be imported.
    """
    code = f"import {', '.join(modules)}\n"
    code += "".join(f"getattr({m}, 'prepare', int)()\n" for m in modules)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=root,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise GuestFailure(f"the tests cannot be imported:\n{done.stderr}")


def guest_environment() -> dict[str, str]:
    """What is set in the guest, and here while something is compiled for it."""
    # The checkout in both places, whatever is installed: numba looks for what it has compiled by
    # the path of the source, and compiling takes minutes in there.
    path = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")]), str(_TESTS.parent)]
    kept = {n: v for n, v in os.environ.items() if n.startswith("MOECOMM_TEST_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MOECOMM_CACHE_DIR": str(cache_folder() / "kernels"),
        # One machine code for both processors, this one's and the emulated one.
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/tmp",
    }


def _results(lines: Sequence[str]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    entries: Iterable[dict[str, str]] = map(json.loads, lines)
    for entry in entries:
        test, outcome, text = entry["test"], entry["outcome"], entry["text"]
        known = results.get(test)
        if outcome == "started":
            outcome, text = "failed", _NO_END
        elif outcome == "passed" and known is not None and known.text != _NO_END:
            continue  # the last stage went well, an earlier one did not
        results[test] = Result(outcome, float(entry["seconds"]), text)
    return results
