"""What a rank's process of ``moecomm.run`` does. Imports little: it decides the start-up time."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import mmap
import os
import pickle
import runpy
import signal
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moecomm.errors import ConfigError, StateError

DUMP_SIGNAL: Final = signal.SIGUSR1
RESULT: Final = struct.Struct("!Q")  # length of the pickled Report that follows
_PR_SET_PDEATHSIG: Final = 1

importing_main = False  # while true, moecomm.run is being called for want of a main guard


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank gets, pickled into memory that they all read."""

    size: int
    store: tuple[str, int, str]  # host, port, job
    device: str
    transport: str
    argv: list[str]
    main_module: str | None  # how to import the caller's __main__, where the call needs it
    main_path: str | None
    module: tuple[str, str] | None  # name and file of the module that defines the function
    call: bytes  # (fn, args), pickled


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank sends back, once. Exactly one of the three is set."""

    value: bytes | None = None  # the result, pickled
    error: bytes | None = None  # the exception, pickled
    text: str = ""  # of an exception that does not pickle: "ValueError: message"
    exit_code: int | None = None  # the function called sys.exit
    traceback: str = ""


def main(task_fd: int, report_fd: int, dump_fd: int, life_fd: int, rank: int, parent: int) -> None:
    """Read the task, call the function, report, leave."""
    _end_with(parent, life_fd)
    for fd in (task_fd, report_fd, dump_fd, life_fd):
        os.set_inheritable(fd, False)
    faulthandler.enable(dump_fd)
    faulthandler.register(DUMP_SIGNAL, dump_fd)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the caller's business
    report = _work(task_fd, rank)
    data = pickle.dumps(report)
    view = memoryview(RESULT.pack(len(data)) + data)
    while view:
        view = view[os.write(report_fd, view) :]
    sys.exit(0 if report.value is not None else 1)


def _end_with(parent: int, life_fd: int) -> None:
    """Die when the parent dies, even while native code holds the interpreter's lock."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)
        return

    def watch() -> None:
        os.read(life_fd, 1)  # nobody writes; it returns when the parent's end closes
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(task_fd: int, rank: int) -> Report:
    try:
        with mmap.mmap(task_fd, 0, access=mmap.ACCESS_READ) as data:
            task: Task = pickle.loads(data)
        fn, args = _load(task)
        value = _call(task, rank, fn, args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return Report(exit_code=code, traceback=traceback.format_exc())
    except BaseException as error:  # noqa: BLE001  the caller raises it
        return _failure(error)
    try:
        return Report(value=pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # noqa: BLE001  pickle raises anything
        return _failure(
            ConfigError(
                f"the result of rank {rank}, a {type(value).__qualname__}, cannot be pickled: "
                f"{error}"
            )
        )


def _load(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    sys.argv[:] = task.argv
    if task.main_module or task.main_path:
        _import_main(task)
    if task.module is not None:
        _import_defining(*task.module)
    call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(task.call)
    return call


def _call(task: Task, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from moecomm.group import Group
    from moecomm.store import TcpStore

    host, port, job = task.store
    store = TcpStore(host, port, job=job)
    group = Group(rank, task.size, store, device=task.device, transport=task.transport)
    try:
        return fn(group, *args)
    finally:
        store.close()  # a subgroup that the function keeps has no use for it any more


def _import_main(task: Task) -> None:
    """Run the caller's script as ``__mp_main__`` and let ``__main__`` mean it, as
    multiprocessing does, so that functions pickled as ``__main__.fn`` are found."""
    global importing_main
    importing_main = True
    try:
        if task.main_module is not None:
            content = runpy.run_module(task.main_module, run_name="__mp_main__", alter_sys=True)
        else:
            content = runpy.run_path(str(task.main_path), run_name="__mp_main__")
    finally:
        importing_main = False
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _import_defining(name: str, path: str) -> None:
    """Import a module by name, or from its file where no search path leads to it (pytest's
    importlib mode, for one)."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        spec = importlib.util.spec_from_file_location(name, path)
        if error.name not in _parents(name) or spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _failure(error: BaseException) -> Report:
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        data = pickle.dumps(error)
        same = type(pickle.loads(data)) is type(error)
    except Exception:  # noqa: BLE001  pickle raises anything
        same = False
    return Report(error=data if same else None, text=summary, traceback=text)


def refuse_in_main_import() -> None:
    """Called by ``moecomm.run``: it must not start ranks from a rank's import of the script."""
    if importing_main:
        raise StateError(
            "moecomm.run was called while a rank imports the script; put the call under "
            "if __name__ == '__main__':"
        )
