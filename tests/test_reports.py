"""docs/reports.md: every report has its tests, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from moecomm.doctor.memory import FIX_LOCKED
from moecomm.doctor.rdma import DEVICES
from moecomm.transport import NETWORKS, TRANSPORTS

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "reports.md"
# The reports that bear on what this version does. Numbers that are missing were withdrawn.
ROWS = {
    "A": "02 03 04 05 06 08 09 10 12 13 14 16 17 18 19 20 21 22 23 24 26 27",
    "B": "01 02 04 05 06 07 09 10 12 13 14",
    "C": "02 03 04 05 06 07 08 09 10 11 12 13",
    "D": "01 03 04 05 07 08 09 10 11 12 13 14 15 16 17 18",
    "E": "01 02 04 05 06 07 08",
    "F": "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15",
    "G": "01 02 03 04 05 06 07 08 09 10 11",
    "H": "05 07",
}
EXPECTED = [letter + number for letter, numbers in ROWS.items() for number in numbers.split()]


def rows() -> dict[str, str]:
    """Row → its cell of tests."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {row[0]: row[3] for row in cells if re.fullmatch(r"[A-Z]\d\d", row[0])}


@cache
def functions(module: str) -> frozenset[str]:
    path = ROOT / "tests" / f"test_{module}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def test_every_report_has_a_row() -> None:
    assert list(rows()) == EXPECTED


@pytest.mark.parametrize("row", EXPECTED)
def test_a_row_names_tests_that_exist_or_what_it_needs(row: str) -> None:
    cell = rows()[row]
    named = re.findall(r"`(\w+)::(\w+)`", cell)
    for module, name in named:
        assert name in functions(module), f"{module}::{name}"
    assert named or re.match(r"needs .*(GPU|NIC)", cell)


def test_tests_that_carry_a_row_are_in_it() -> None:
    """``test_a02_a04_...`` is named in rows A02 and A04."""
    table = rows()
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        module = path.stem.removeprefix("test_")
        for name in functions(module):
            prefix = re.match(r"test((?:_[a-h]\d\d)+)_", name)
            for row in prefix.group(1).upper().split("_")[1:] if prefix else []:
                assert f"{module}::{name}" in table[row], f"{row} lacks {module}::{name}"


def answers() -> dict[str, str]:
    """The README's questions, and what it answers."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\*\*(.+?\?)\*\* (.+?)\n\n", readme, re.MULTILINE | re.DOTALL)
    return {question: " ".join(answer.split()) for question, answer in found}


def answer(words: str) -> str:
    """The one to the question with these words."""
    (found,) = (text for question, text in answers().items() if words in question)
    return found


def test_g11_the_readme_answers_what_others_had_to_ask() -> None:
    """Must caps be equal? What needs root or a reboot? How to check an install?"""
    assert answer("equal on all ranks").startswith("Yes.")
    assert "`PeerTimeout`" in answer("rank dies")
    assert answer("check an installation").startswith("`moecomm doctor`")
    # What it says about root is what the doctor looks at.
    needs = answer("root")
    assert f"`{FIX_LOCKED.partition(' unlimited')[0]}`" in needs
    assert f"`{DEVICES}/uverbs*`" in needs
    assert "`nvidia-peermem`" in needs


def test_g11_which_nics_work_is_what_the_package_has_and_the_table_says() -> None:
    nics = answer("Which NICs")
    named = set(re.findall(r"`(\w+)`", nics))
    assert set(NETWORKS) <= named <= set(TRANSPORTS)
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    status = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", table, re.MULTILINE))
    assert set(status) == set(TRANSPORTS)
    for name in named:
        assert "not yet run on" in status[name], name
    assert "no real NIC has been tried" in nics
    for stand_in in ("soft-RoCE", "tcp and shm"):
        assert stand_in in nics
        assert stand_in in status["verbs"] + status["efa"]
