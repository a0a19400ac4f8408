"""What the README and the documents say is there is there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moecomm
from moecomm.env import VARIABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_example_is_the_file() -> None:
    assert blocks(README, "python") == [
        (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    ]


def test_the_example_is_short() -> None:
    """Twelve statements, but for imports and the main guard's line."""
    tree = ast.parse(blocks(README, "python")[0])
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.If)
    ]
    assert len(statements) <= 12


def test_the_example_runs() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    errors = ast.literal_eval(shown.stdout.partition(":")[2].strip())
    assert len(errors) == 4
    assert max(errors) < 1e-5


def test_the_two_commands_are_those_of_ci() -> None:
    commands = blocks(README, "console")[0].replace("$ ", "").split("\n")
    assert commands[:2] == ["pip install . && moecomm demo", 'pip install ".[test]" && pytest']
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -qq . && moecomm demo" in ci
    assert 'pip install -qq ".[test]"' in ci
    assert re.search(r"^pytest\b", (ROOT / "scripts" / "check").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    """Every `moecomm ...` in code: its subcommand and long options are in that help."""
    spans = re.findall(r"`+([^`]+)`+", document.read_text(encoding="utf-8"))
    for span in spans:
        for line in re.findall(r"(?:^|\$ |&& )moecomm ([a-z]+[^&|\n;]*)", span, re.M):
            name, *rest = line.split()
            shown = subprocess.run(
                [sys.executable, "-m", "moecomm", name, "--help"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert shown.returncode == 0, f"moecomm {name}: {shown.stderr}"
            for option in (word for word in rest if word.startswith("--")):
                assert option in shown.stdout, f"moecomm {name} {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_code_exist(document: Path) -> None:
    """`moecomm/...`, `tests/...` and the like, as the documents name them."""
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:moecomm|tests|docs|examples|scripts|\.ci)/[\w./*]+)`", text):
        assert list(ROOT.glob(path)), path


def test_api_names_of_the_readme_are_exported() -> None:
    table = README.partition("## API")[2].partition("## ")[0]
    names = set(re.findall(r"`([A-Z]\w+)", table)) | {"run", "reference"}
    for name in names:
        assert hasattr(moecomm, name), name
    for path in re.findall(r"`(moecomm(?:\.\w+)+)", table):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_the_errors_of_the_readme_are_all_that_a_caller_should_tell_apart() -> None:
    """Those right below the first, and below the one of communication."""
    (row,) = re.findall(r"^\| `MoecommError` and below \| (.*) \|$", README, re.M)
    errors = [*moecomm.MoecommError.__subclasses__(), *moecomm.TransportError.__subclasses__()]
    own = {e.__name__ for e in errors if e.__module__ == "moecomm.errors"}
    assert set(re.findall(r"`(\w+)`", row)) == own


def test_extras_named_in_documents_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    for document in DOCUMENTS:
        for named in re.findall(r"\.?\[([a-z0-9,]+)\]\"", document.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras
    assert extras >= {"cuda13", "nvshmem", "verbs", "efa", "torch", "tune", "test", "dev"}


def test_every_environment_variable_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [f"| `{v.full_name}` | {v.default} | {v.meaning} |" for v in VARIABLES]
    assert rows == re.findall(r"^\| `MOECOMM_.*\|$", text, re.MULTILINE)


def test_snippets_of_the_documents_run() -> None:
    snippets = [
        block
        for document in DOCUMENTS
        if document.parent.name == "docs"
        for block in blocks(document.read_text(encoding="utf-8"), "python")
    ]
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "a document's snippet", "exec"), {"__name__": "snippet"})
