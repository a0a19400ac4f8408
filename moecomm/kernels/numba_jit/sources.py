"""The files of kernels in Python, read as text: their functions and numbers, by name.

All kernel files share one set of names, as C files do that are linked: a function of the user's
file takes the place of the package's function of that name, wherever it is called.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moecomm.cache import key_of
from moecomm.errors import ConfigError
from moecomm.kernels.numba import device

PACKAGE: Final = Path(device.__file__).parent
NOT_KERNELS: Final = ("__init__.py", "device.py")
BUILTINS: Final = ("range", "max", "min", "abs")
# The numbers of the problem; `moe_config` of shim.cuh knows them by their place here.
CONSTANTS: Final = tuple(name for name in vars(device) if name.isupper())
# What shim.cuh has: name → number of arguments.
MACHINE: Final = {
    name: len(inspect.signature(function).parameters)
    for name, function in vars(device).items()
    if inspect.isfunction(function) and function.__module__ == device.__name__
}


def package_files() -> list[Path]:
    return sorted(f for f in PACKAGE.glob("*.py") if f.name not in NOT_KERNELS)


def load(file: Path) -> str:
    """Return the text of a kernel file."""
    return file.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a kernel file.

    ``args`` is its parameter that is annotated ``Args``, if it has one; ``uses`` are the names
    that it reads and does not set; ``fields`` those of its ``args`` that it reads itself.
    """

    name: str
    file: Path
    node: ast.FunctionDef
    args: str | None
    uses: frozenset[str]
    fields: frozenset[str]

    @property
    def parameters(self) -> list[str]:
        return [argument.arg for argument in self.node.args.args]

    def error(self, node: ast.AST, what: str) -> ConfigError:
        return ConfigError(f"{self.file}:{getattr(node, 'lineno', self.node.lineno)}: {what}")


def read(user: Path | None = None) -> Sources:
    """Return the package's kernel files, with ``user``'s (a file, or a folder) over them.

    Raises:
        ConfigError: a file cannot be read or parsed, or says what a kernel cannot.
    """
    files = (*package_files(), *(_user_files(user) if user else ()))
    texts = []
    for file in files:
        try:
            texts.append((file, load(file)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"kernels: {file} cannot be read: {error}") from error
    return _parsed(tuple(texts))


@functools.lru_cache(maxsize=16)
def _parsed(texts: tuple[tuple[Path, str], ...]) -> Sources:
    """The same object for the same texts: what is made from it is kept with it."""
    return Sources(texts)


class Sources:
    """Parsed kernel files: the package's, then the user's. See ``read``."""

    def __init__(self, texts: Sequence[tuple[Path, str]]) -> None:
        self.functions: dict[str, Function] = {}
        self.numbers: dict[str, int] = {}
        for file, text in texts:
            self._add(file, text)

    def reached_from(self, *entries: str) -> list[Function]:
        """``entries`` and what they call, directly or not, sorted by name.

        Raises:
            ConfigError: there is no such function, or one uses a name that nobody defines.
        """
        found: dict[str, Function] = {}
        todo = list(entries)
        while todo:
            name = todo.pop()
            if name not in self.functions:
                raise ConfigError(f"kernels: no file defines the stage {name}")
            function = found[name] = self.functions[name]
            self._check_names(function)
            todo += [name for name in function.uses if name in self.functions and name not in found]
        return [found[name] for name in sorted(found)]

    def digest(self) -> str:
        """Hash of everything that the files say."""
        parts = [f"{f.name}\n{ast.dump(f.node)}" for f in self.functions.values()]
        return key_of(*sorted(parts), repr(sorted(self.numbers.items())))

    def fields(self, name: str) -> tuple[str, ...]:
        """Fields of ``Args`` that a function, or what it calls, reads: in the order of ``Args``."""
        read: set[str] = set()
        for function in self.reached_from(name):
            read |= function.fields
        return tuple(field for field in device.Args._fields if field in read)

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset((*self.functions, *self.numbers, *CONSTANTS, *MACHINE, *BUILTINS))

    def _check_names(self, function: Function) -> None:
        unknown = sorted(function.uses - self._known)
        if unknown:
            raise function.error(
                function.node,
                f"{function.name} uses {unknown[0]}, which neither a kernel file nor "
                "moecomm/kernels/numba/device.py defines",
            )

    def _add(self, file: Path, text: str) -> None:
        try:
            tree = ast.parse(text, str(file))
        except SyntaxError as error:
            raise ConfigError(f"kernels: {file} cannot be read: {error}") from error
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._add_function(file, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                self._add_numbers(file, node)
            elif not _is_harmless(node):
                raise ConfigError(
                    f"{file}:{node.lineno}: a kernel file has imports, numbers and functions only"
                )

    def _add_function(self, file: Path, node: ast.FunctionDef) -> None:
        function = _function(file, node)
        before = self.functions.get(node.name)
        if before is not None and _is_ours(file) == _is_ours(before.file):
            raise function.error(node, f"{before.file} defines {node.name}, too")
        if node.name in MACHINE:
            raise function.error(node, f"{node.name} is a function of the machine (device.py)")
        self.functions[node.name] = function

    def _add_numbers(self, file: Path, node: ast.Assign | ast.AnnAssign) -> None:
        found: dict[str, Any] = {}
        try:
            code = compile(ast.Module([node], []), str(file), "exec")
            exec(code, {"__builtins__": {}, **self.numbers}, found)
        except NameError as error:
            raise ConfigError(
                f"{file}:{node.lineno}: {error}; outside of functions there are only numbers of "
                "kernel files, not the problem's"
            ) from error
        for name, value in found.items():
            if not isinstance(value, int):
                raise ConfigError(f"{file}:{node.lineno}: {name}={value!r}: must be an integer")
            self.numbers[name] = value


def _function(file: Path, node: ast.FunctionDef) -> Function:
    arguments = node.args
    plain = not (arguments.posonlyargs or arguments.kwonlyargs or arguments.defaults)
    if node.decorator_list or arguments.vararg or arguments.kwarg or not plain:
        raise ConfigError(
            f"{file}:{node.lineno}: {node.name}: a kernel's function has plain parameters, and no "
            "decorators"
        )
    args = [a.arg for a in arguments.args if _is_name(a.annotation, "Args")]
    own = {argument.arg for argument in arguments.args}
    read: set[str] = set()
    fields: set[str] = set()
    for part in (n for statement in node.body for n in ast.walk(statement)):
        if isinstance(part, ast.Name):
            (read if isinstance(part.ctx, ast.Load) else own).add(part.id)
        elif isinstance(part, ast.Attribute) and args and _is_name(part.value, args[0]):
            if part.attr not in device.Args._fields:
                raise ConfigError(f"{file}:{part.lineno}: Args has no field {part.attr}")
            fields.add(part.attr)
        elif isinstance(part, ast.FunctionDef | ast.Lambda):
            raise ConfigError(f"{file}:{part.lineno}: a function inside of a kernel's function")
    return Function(
        node.name, file, node, args[0] if args else None, frozenset(read - own), frozenset(fields)
    )


def _is_name(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_ours(file: Path) -> bool:
    return file.parent == PACKAGE


def _is_harmless(node: ast.stmt) -> bool:
    """Imports, which are for readers and editors, and docstrings."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _user_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.glob("*.py") if file.name not in NOT_KERNELS]
        if not files:
            raise ConfigError(f"kernels={str(path)!r}: no .py file in that folder")
        return sorted(files)
    if not path.is_file():
        raise ConfigError(f"kernels={str(path)!r}: no such file or folder")
    return [path]
