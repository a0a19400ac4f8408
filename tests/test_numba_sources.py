"""Kernels in Python: their vocabulary agrees with what is behind it, and mistakes are explained."""

from __future__ import annotations

import ast
import dataclasses
import dis
import re
import sys
from pathlib import Path
from types import FunctionType

import pytest

import moecomm as mc
from moecomm.codecs import fp8
from moecomm.kernels import args, choice, geometry, source
from moecomm.kernels.numba import (
    combine_recv,
    combine_send,
    device,
    dispatch_recv,
    placement,
    routing,
)
from moecomm.kernels.numba import protocol as p
from moecomm.kernels.numba_jit.lowered import lower
from moecomm.kernels.numba_jit.problem import numbers
from moecomm.kernels.numba_jit.sources import MACHINE, package_files, read
from moecomm.kernels.stages import STAGES
from moecomm.regions import LAYOUT_CODES
from moecomm.remote import Remote
from moecomm.runtime import open_runtime
from moecomm.store_local import LocalStore

BASE = {"num_experts": 7, "top_k": 3, "hidden": 40, "max_tokens": 8}
SHIM = re.compile(r"^SHIM i64 moe_(\w+)\(([^)]*)\)", re.MULTILINE)


def test_the_machine_is_what_the_shim_has() -> None:
    found = {
        name: len([part for part in parameters.split(",") if part.strip()])
        for name, parameters in SHIM.findall(source.load("shim.cuh"))
    }
    assert found.pop("config") == 1  # stands for the numbers of the problem
    assert found == MACHINE


def test_arguments_and_codes_are_those_of_the_host() -> None:
    fields = device.Args._fields
    assert [name for name in args.ARG_FIELDS if name in fields] == list(fields)
    codes = (p.TIMEOUT, p.ABORTED, p.BAD_EXPERT, p.BAD_NUM_TOKENS, p.OVERFLOW)
    assert codes == (
        args.CODE_TIMEOUT, args.CODE_ABORTED, args.CODE_BAD_EXPERT, args.CODE_BAD_NUM_TOKENS,
        args.CODE_OVERFLOW,
    )  # fmt: skip
    assert (p.STATUS_FAILURE, p.STATUS_VALUE, p.STATUS_OVERFLOW) == (
        args.STATUS_FAILURE, args.STATUS_VALUE, args.STATUS_OVERFLOW,
    )  # fmt: skip
    phases = (p.DISPATCH_SEND, p.DISPATCH_RECV, p.COMBINE_SEND, p.COMBINE_RECV)
    assert phases == tuple(range(len(args.PHASES)))
    assert LAYOUT_CODES == {
        "batched": p.LAYOUT_BATCHED, "grouped": p.LAYOUT_GROUPED, "rank": p.LAYOUT_RANK,
    }  # fmt: skip


def test_every_number_of_the_problem_is_known() -> None:
    layout = mc.Layout(mc.MoeConfig(**BASE), 2, 0)
    for stage in STAGES:
        assert len(numbers(layout, stage, 0, 64)) > 60


@pytest.mark.parametrize("experts", [1, 7, 256, 2048])
@pytest.mark.parametrize("num_ranks", [1, 2, 64, 1024])
def test_shared_memory_is_enough(experts: int, num_ranks: int) -> None:
    cfg = mc.MoeConfig(**{**BASE, "num_experts": experts, "top_k": 1}, wire="flags")
    layout = mc.Layout(cfg, num_ranks, 0)
    most = layout.max_local_experts

    def has(stage: str) -> int:
        return geometry.shared_bytes(stage, layout, 64)

    assert routing.TABLES + 8 * num_ranks + 4 * experts + 4 * num_ranks <= has("dispatch_send")
    tables = 4 * ((num_ranks + 2) * most + 1 + num_ranks + 1 + 1)
    assert placement.PLAN_END + tables <= has("dispatch_recv")
    assert has("combine_send") >= combine_send.NUM_Y + 4
    assert has("combine_recv") >= combine_recv.NUM_OWED + 4


def test_a_file_is_a_page_or_two() -> None:
    assert dispatch_recv.__file__ is not None
    for file in package_files():
        assert len(file.read_text().splitlines()) <= 330, file


def test_functions_are_lowered_with_the_fields_they_need() -> None:
    lowered = {part.name: part for part in lower(read(), *STAGES)}
    assert lowered["peer_base"].num_parameters == 2  # a.local, rank
    assert lowered["expert_rank"].num_parameters == 1
    assert lowered["release"].num_parameters < len(args.ARG_FIELDS)


def test_a_change_concerns_one_function(tmp_path: Path) -> None:
    """The others come from the cache: texts, which are the keys, stay."""
    mine = tmp_path / "mine.py"
    mine.write_text("def warp_sum(value: int) -> int:\n    return value + shuffle_xor(value, 1)\n")
    before = {part.name: part.text for part in lower(read(), *STAGES)}
    after = {part.name: part.text for part in lower(read(mine), *STAGES)}
    assert {name for name in after if before.get(name) != after[name]} == {"warp_sum"}


STAGE = "def release(a: Args) -> None:\n"
MISTAKES = {
    "name": (f"{STAGE}    nothing_here(1)\n", "mine.py:1: release uses nothing_here, which"),
    "arity": (f"{STAGE}    shuffle(1)\n", "mine.py:2: shuffle takes 2 arguments, not 1"),
    "keyword": (f"{STAGE}    shuffle(1, lane=2)\n", "mine.py:2: shuffle(1, lane=2): call by"),
    "field": (f"{STAGE}    store_i32(a.locale, 1)\n", "mine.py:2: Args has no field locale"),
    "args": (f"{STAGE}    b = a\n", "mine.py:2: a can only be handed on"),
    "not-args": (f"{STAGE}    sent_epoch(1)\n", "mine.py:2: sent_epoch wants Args, not 1"),
    "result": (f"{STAGE}    return 1\n", "mine.py:2: release returns nothing, as it is annotated"),
    "no-result": (
        "def warp_sum(value: int) -> int:\n    return\n", "mine.py:2: warp_sum must return",
    ),
    "number": ("ROWS = HIDDEN\n", "mine.py:1: name 'HIDDEN' is not defined"),
    "float": ("HALF = 0.5\n", "mine.py:1: HALF=0.5: must be an integer"),
    "class": ("class Kernel:\n    pass\n", "mine.py:1: a kernel file has imports, numbers and"),
    "decorator": (f"@jit\n{STAGE}    return\n", "release: a kernel's function has plain"),
    "machine": ("def sync_block() -> int:\n    return 0\n", "is a function of the machine"),
    "syntax": ("def release(a:\n", "mine.py cannot be read: '(' was never closed"),
    "inner": (f"{STAGE}    def f():\n        return 1\n", "mine.py:2: a function inside of"),
    "stage": ("def release(a: Args, b: int) -> None:\n    return\n", "must be `def release(a: Arg"),
    "assigned": (f"{STAGE}    HIDDEN = 3\n", "mine.py:2: HIDDEN is a number of the problem"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str, tmp_path: Path) -> None:
    text, message = MISTAKES[name]
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(mc.ConfigError) as caught:
        lower(read(tmp_path / "mine.py"), *STAGES)
    assert message in str(caught.value)


def test_paths_are_explained(tmp_path: Path) -> None:
    with pytest.raises(mc.ConfigError, match="no such file or folder"):
        choice.choose(tmp_path / "missing.py")
    with pytest.raises(mc.ConfigError, match=r"no \.py file in that folder"):
        choice.choose(tmp_path)
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(f"{STAGE}    return\n")
    with pytest.raises(mc.ConfigError, match=r"one\.py defines release, too"):
        choice.choose(tmp_path)


def test_what_ranks_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("# as it was\n")
    plain = choice.identity("numba")
    assert choice.identity(mine) == plain
    mine.write_text("def warp_sum(value: int) -> int:\n    return value\n")
    assert choice.identity(mine) != plain
    mine.write_text("def warp_sum(\n")
    assert "cannot be read" in choice.identity(mine)
    assert choice.identity("auto") == "cuda"
    monkeypatch.setenv("MOECOMM_KERNELS", "numba")
    assert choice.identity("auto") == plain


def test_the_wire_of_kernels_in_python() -> None:
    cfg = mc.MoeConfig(**BASE)
    assert choice.fitting(cfg, read()).wire == "flags"
    assert choice.fitting(cfg, None) is cfg
    with pytest.raises(mc.ConfigError, match="wire='lines': kernels in Python"):
        choice.fitting(mc.MoeConfig(**BASE, wire="lines"), read())


def test_what_kernels_in_python_do_not_serve() -> None:
    with pytest.raises(mc.ConfigError, match="kernels in Python call no codecs"):
        choice.fitting(mc.MoeConfig(**BASE, codec=fp8(16)), read())
    cfg = mc.MoeConfig(**BASE, wire="flags")
    remote = mc.Layout(cfg, 2, 0, Remote(mode="proxied"))
    group = mc.Group(0, 1, LocalStore())
    with pytest.raises(mc.ConfigError, match=r"these peers are remote \(transport='nvshmem'\)"):
        open_runtime(remote, group, "nvshmem", "cpu", read())


# ---- a call stays one call ---------------------------------------------------------------------
# Python 3.12 and later copy the short ends of these to where a jump leads to them.
COPIED = {
    "behind-a-branch": """def warp_sum(value: int) -> int:
    if value > 3:
        value = 1
    else:
        value = 2
    return sync_block()
""",
    "before-a-loop": """def warp_sum(value: int) -> int:
    seen = 0
    while ballot(value > 0) != 0:
        seen += 1
        if value == 0:
            continue
        value -= 1
    return seen
""",
    "of-a-choice": """def warp_sum(value: int) -> int:
    return match(1 if value > 3 else lane_id())
""",
    "behind-a-loop": """def warp_sum(value: int) -> int:
    ok = 1
    for i in range(value):
        if i > 7:
            ok = 0
            break
    return all_threads(ok)
""",
}


def calls(function: FunctionType) -> int:
    """Instructions that call something, the one that asks for a loop's range aside."""
    steps = list(dis.get_instructions(function))
    ranges = sum(step.opname == "GET_ITER" for step in steps)
    return sum(step.opname == "CALL" for step in steps) - ranges


@pytest.mark.parametrize("name", COPIED)
def test_python_makes_one_call_of_a_call(name: str, tmp_path: Path) -> None:
    text = COPIED[name]
    names: dict[str, FunctionType] = {}
    exec(text, names)
    wanted = len(re.findall(r"\w+\(", text)) - 1 - text.count("range(")
    if sys.version_info >= (3, 12):  # what this is about
        assert calls(names["warp_sum"]) > wanted or name == "behind-a-loop"
    (tmp_path / "mine.py").write_text(text)
    (part,) = (p for p in lower(read(tmp_path / "mine.py"), *STAGES) if p.name == "warp_sum")
    assert calls(part.bind(lambda symbol, num: abs, "mine.py")) == wanted


def test_kernels_call_once_what_they_call_once() -> None:
    for part in lower(read(), *STAGES):
        part.bind(lambda symbol, num: abs, "kernels")  # raises if Python has copied a call


def test_a_call_that_python_has_copied_is_an_error() -> None:
    (part,) = (p for p in lower(read(), *STAGES) if p.name == "warp_sum")
    node = ast.parse("def warp_sum(value):\n    abs(value)\n    return abs(value)\n").body[0]
    assert isinstance(node, ast.FunctionDef)
    first, last = (s.value for s in node.body if isinstance(s, ast.Expr | ast.Return))
    assert first is not None
    assert last is not None
    ast.copy_location(last, first)  # as a copy has it
    copied = dataclasses.replace(part, node=node)
    with pytest.raises(mc.CompileError, match=r"warp_sum, line 2: Python has copied a call to 2"):
        copied.bind(lambda symbol, num: abs, "mine.py")
