"""A kernel's function as a C function of integers, which numba compiles by itself.

What changes on the way: the problem's numbers become calls of ``config(place)``; an ``Args``
parameter becomes one parameter for each field that is needed, here or further down; every function
returns an integer, and gives it a name first (see ``_Transform.visit_Return``). So each is compiled
once, whatever the problem, and again only when its own text changes; calls and numbers are resolved
when the machine code is linked.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from moecomm.errors import CompileError, ConfigError
from moecomm.kernels.numba_jit.sources import BUILTINS, CONSTANTS, MACHINE, Function, Sources

MACHINE_PREFIX: Final = "moe_"  # of shim.cuh's functions
PYTHON_PREFIX: Final = "moe_py_"  # of functions from Python
_RESULT: Final = "moe_result"


@dataclass(frozen=True, eq=False)
class Lowered:
    """``symbol`` takes ``num_parameters`` i64 and returns one; ``calls`` are symbols with their
    numbers of parameters; ``numbers`` those of kernel files that it reads."""

    function: Function
    num_parameters: int
    node: ast.FunctionDef
    calls: dict[str, tuple[str, int]]  # name in Python → symbol, parameters
    numbers: dict[str, int]

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def symbol(self) -> str:
        return PYTHON_PREFIX + self.name

    @functools.cached_property
    def text(self) -> str:
        """All that the machine code depends on; lines stand in the emulator's reports."""
        lines = [str(getattr(n, "lineno", "")) for n in ast.walk(self.node)]
        parts = (self.function.file.name, ast.dump(self.node), *lines, self.calls, self.numbers)
        return "\n".join(map(str, parts))

    def bind(self, external: Callable[[str, int], Any], file: str) -> FunctionType:
        """The Python function, with ``external(symbol, parameters)`` for what it calls; ``file``
        is what errors and debug information name."""
        namespace: dict[str, Any] = dict(self.numbers)
        namespace |= {name: external(*target) for name, target in self.calls.items()}
        tree = ast.fix_missing_locations(ast.Module([self.node], []))
        exec(compile(tree, file, "exec"), namespace)  # kernels are code
        built: FunctionType = namespace[self.name]
        self._check_single_calls(built)
        return built

    def _check_single_calls(self, built: FunctionType) -> None:
        """Raise ``CompileError`` if Python has made one call two (see ``visit_Return``)."""
        calls = Counter(
            tuple(step.positions or ())
            for step in dis.get_instructions(built)
            if step.opname.startswith("CALL")
        )
        for position, count in calls.items():
            if count > 1:
                raise CompileError(
                    f"{self.name}, line {position[0]}: Python has copied a call to {count} places, "
                    "so threads could miss each other there; put what follows into a variable first"
                )


@functools.lru_cache(maxsize=64)
def lower(sources: Sources, *entries: str) -> tuple[Lowered, ...]:
    """Lower all functions that ``entries`` reach.

    Raises:
        ConfigError: a function does what a kernel cannot.
    """
    for entry in entries:
        _check_entry(sources, entry)
    return tuple(_lower(sources, function) for function in sources.reached_from(*entries))


def files(lowered: Sequence[Lowered], make: Callable[[Lowered], Path]) -> list[Path]:
    """``make`` each function's file, which finds or builds it in the cache. Processes that start
    together begin at different functions, so that each builds its share."""
    first = os.getpid() % len(lowered)
    for part in (*lowered[first:], *lowered[:first]):
        make(part)
    return [make(part) for part in lowered]


def _check_entry(sources: Sources, stage: str) -> None:
    function = sources.functions.get(stage)
    if function is None or function.args is None or len(function.parameters) != 1:
        raise ConfigError(f"kernels: the stage must be `def {stage}(a: Args) -> None`")


def _lower(sources: Sources, function: Function) -> Lowered:
    transform = _Transform(sources, function)
    node = transform.visit(copy.deepcopy(function.node))
    calls = {
        name: (MACHINE_PREFIX + name, MACHINE[name]) for name in function.uses if name in MACHINE
    }
    calls |= {
        name: (PYTHON_PREFIX + name, len(_parameters(sources, sources.functions[name])))
        for name in function.uses
        if name in sources.functions
    }
    if function.uses & set(CONSTANTS):
        calls["config"] = (MACHINE_PREFIX + "config", 1)
    numbers = {name: sources.numbers[name] for name in function.uses if name in sources.numbers}
    count = len(_parameters(sources, function))
    return Lowered(
        function, count, node, dict(sorted(calls.items())), dict(sorted(numbers.items()))
    )


def _parameters(sources: Sources, function: Function) -> list[str]:
    """Names of the lowered function's parameters."""
    names: list[str] = []
    for name in function.parameters:
        if name == function.args:
            names += [_field(name, field) for field in sources.fields(function.name)]
        else:
            names.append(name)
    return names


def _field(args: str, field: str) -> str:
    return f"{args}_{field}"


class _Transform(ast.NodeTransformer):
    def __init__(self, sources: Sources, function: Function) -> None:
        self._sources = sources
        self._function = function
        self._returns_nothing = (
            isinstance(function.node.returns, ast.Constant) and function.node.returns.value is None
        )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        names = _parameters(self._sources, self._function)
        node.args.args = [ast.copy_location(ast.arg(name), node) for name in names]
        node.returns = None
        if self._returns_nothing:
            node.body.append(ast.copy_location(ast.Return(), node.body[-1]))
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        """``result = value; return result + 0``. Python copies a block of up to four instructions
        that ends in a return to wherever a jump leads there: so a barrier, which threads that jump
        and those that do not must meet at, would be two. These are six, without what calls need.
        (Python 3.12; an H200 waited for ever.)"""
        nothing = node.value is None
        if nothing != self._returns_nothing:
            rule = "returns nothing" if self._returns_nothing else "must return an integer"
            raise self._function.error(node, f"{self._function.name} {rule}, as it is annotated")
        value = ast.Constant(0) if node.value is None else self.visit(node.value)
        keep = ast.Assign([ast.Name(_RESULT, ast.Store())], value)
        more = ast.BinOp(ast.Name(_RESULT, ast.Load()), ast.Add(), ast.Constant(0))
        back = ast.Return(more)
        return [ast.copy_location(statement, node) for statement in (keep, back)]

    def visit_While(self, node: ast.While) -> ast.AST:
        """Python writes a loop's test twice, before the loop and at its end. A test that calls
        something moves into the loop, so that it stays one."""
        self.generic_visit(node)
        if any(isinstance(part, ast.Call) for part in ast.walk(node.test)):
            leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
            node.body.insert(0, ast.copy_location(leave, node.test))
            node.test = ast.copy_location(ast.Constant(True), node.test)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        args = self._function.args
        if args is None or not isinstance(node.value, ast.Name) or node.value.id != args:
            raise self._function.error(node, f"{ast.unparse(node)}: only Args has fields")
        return ast.copy_location(ast.Name(_field(args, node.attr), ast.Load()), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in CONSTANTS:
            if not isinstance(node.ctx, ast.Load):
                raise self._function.error(node, f"{node.id} is a number of the problem")
            place = ast.Constant(CONSTANTS.index(node.id))
            call = ast.Call(ast.Name("config", ast.Load()), [place], [])
            return ast.copy_location(call, node)
        if node.id == self._function.args:
            raise self._function.error(
                node, f"{node.id} can only be handed on, or asked for a field"
            )
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise self._function.error(node, f"{ast.unparse(node)}: call by name and position")
        called = self._sources.functions.get(node.func.id)
        wanted = len(called.parameters) if called else MACHINE.get(node.func.id)
        if wanted is None and node.func.id not in BUILTINS:
            raise self._function.error(node, f"{node.func.id} is not a function")
        if wanted is not None and wanted != len(node.args):
            raise self._function.error(
                node, f"{node.func.id} takes {wanted} arguments, not {len(node.args)}"
            )
        node.args = [
            part for i, given in enumerate(node.args) for part in self._given(called, i, given)
        ]
        return node

    def _given(self, called: Function | None, i: int, given: ast.expr) -> list[ast.expr]:
        """Argument ``i`` of a call, or the fields that stand for it."""
        if called is None or called.args is None or called.parameters[i] != called.args:
            return [self.visit(given)]
        args = self._function.args
        if args is None or not isinstance(given, ast.Name) or given.id != args:
            raise self._function.error(given, f"{called.name} wants Args, not {ast.unparse(given)}")
        names = [_field(args, field) for field in self._sources.fields(called.name)]
        return [ast.copy_location(ast.Name(name, ast.Load()), given) for name in names]
