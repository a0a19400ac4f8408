"""Would the tests notice? Faults in kernels, one at a time: built in, and looked for.

Each fault is one line that a tired author could get wrong. Each is looked for in a process of its
own, since a faulty kernel may also write anywhere; as many at once as there are processors.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

import moecomm as mc
from moecomm import cpus
from moecomm.kernels import source

SEEDS = 40
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
Look = Callable[..., str | None]


@dataclass(frozen=True)
class Mutation:
    """In file ``name``, the one place that reads ``right`` becomes ``wrong``.

    ``wire``: how bytes travel, such as ``"flags"`` or ``"proxied"``; ``setting``: the steps that
    give the fault its chance.
    """

    name: str
    right: str
    wrong: str
    wire: str = "flags"
    setting: str = "busy"

    def apply(self, text: str) -> str:
        """The file's text, with the fault."""
        assert text.count(self.right) == 1, "the kernel has changed; state the fault anew"
        return text.replace(self.right, self.wrong)


def mutate(mutation: Mutation) -> None:
    """From now on, CUDA C++ kernels of this process have the fault."""
    plain = source.load
    wrong = mutation.apply(plain(mutation.name))
    source.load = lambda name: wrong if name == mutation.name else plain(name)  # type: ignore


def first_failure(
    simulate: Callable[[int], object],
    seeds: Iterable[int] = range(1, SEEDS + 1),
    noticed: type[Exception] | tuple[type[Exception], ...] = (mc.MoecommError, AssertionError),
) -> str | None:
    """What the first seed that fails says; ``None``: none does."""
    for seed in seeds:
        try:
            simulate(seed)
        except (mc.CompileError, mc.ConfigError):
            raise  # not a kernel any more
        except noticed as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


class Search:
    """Calls ``look(*arguments[name])`` for many names, each in a process.

    ``search[name]``: what it has returned, or how its process has crashed. Raises what it raised.
    """

    def __init__(self, look: Look, arguments: Mapping[str, tuple[Any, ...]]) -> None:
        self._look = look
        self._waiting = dict(arguments)
        self._running: dict[Connection, tuple[str, BaseProcess]] = {}
        self._results: dict[str, str | BaseException | None] = {}
        self._at_once = len(cpus.allowed())

    def __getitem__(self, name: str) -> str | None:
        while name not in self._results:
            while self._waiting and len(self._running) < self._at_once:
                self._start(next(iter(self._waiting)))
            for ended in wait(list(self._running)):
                assert isinstance(ended, Connection)
                self._collect(ended)
        result = self._results[name]
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End what runs."""
        self._waiting.clear()
        for _, process in self._running.values():
            process.kill()
        while self._running:
            self._collect(next(iter(self._running)))

    def _start(self, name: str) -> None:
        context = get_context("spawn")
        here, there = context.Pipe(duplex=False)
        arguments = (there, self._look, self._waiting.pop(name))
        process = context.Process(target=_report, args=arguments, daemon=True)
        process.start()
        there.close()
        self._running[here] = name, process

    def _collect(self, connection: Connection) -> None:
        name, process = self._running.pop(connection)
        try:
            result = connection.recv()
            process.join()
        except EOFError:
            process.join()
            died = f"the process ended with exit code {process.exitcode} and no result"
            crashed = -(process.exitcode or 0) in CRASHES
            result = died if crashed else RuntimeError(f"{name}: {died}")
        self._results[name] = result
        connection.close()


def _report(connection: Connection, look: Look, arguments: tuple[Any, ...]) -> None:
    try:
        result = look(*arguments)
    except Exception:  # noqa: BLE001 - the test raises it, as a type that always pickles
        result = RuntimeError(traceback.format_exc())
    connection.send(result)


def searching(
    request: pytest.FixtureRequest, look: Look, arguments: Mapping[str, tuple[Any, ...]]
) -> Iterator[Search]:
    """For a module's fixture: a search for those names that its selected tests are about."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    search = Search(look, {name: given for name, given in arguments.items() if name in asked})
    yield search
    search.close()
