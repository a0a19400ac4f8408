"""A pytest plugin of the guest: one line of JSON for each test that has ended.

Used with ``-p vm.report --report-file FILE``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-file", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("report_file")
    if path is not None:
        config.pluginmanager.register(_Writer(path))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._write(report.nodeid, "failed", f"in {report.when}:\n{report.longreprtext}")
        elif report.skipped:
            self._write(report.nodeid, "skipped", str(report.longreprtext))
        elif report.when == "teardown":
            self._write(report.nodeid, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext)

    def _write(self, test: str, outcome: str, text: str = "") -> None:
        line = {"test": test, "outcome": outcome, "seconds": self._seconds, "text": text}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
