"""What ranks do in ``test_run.py``. Apart from the tests, whose imports each rank would repeat."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from moecomm.group import Group
from moecomm.run import run


class CarriesData(Exception):
    def __init__(self, message: str, data: dict[str, int]) -> None:
        super().__init__(message)
        self.data = data

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.data)


class DoesNotPickle(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def describe(group: Group, *args: Any) -> tuple[Any, ...]:
    group.barrier()
    return group.rank, group.size, group.device, group.transport, args


def square_sum(group: Group, value: int) -> int:
    return sum(int(v) for v in group.all_gather(b"%d" % (value * group.rank**2)))


def misbehave(group: Group, how: str, who: int = 1) -> str:
    """What rank ``who`` does; the others wait for it in vain."""
    if group.rank != who:
        group.barrier(30)
        return "returned"
    WAYS[how](group)
    return "returned"


def raise_with_cause(_: Group) -> None:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise CarriesData("the effect", {"a": 1}) from error


def raise_unpicklable(_: Group) -> None:
    raise DoesNotPickle(1, 2)


def wait_for_nobody(group: Group) -> None:
    group.subgroup([group.rank, 0]).all_gather(b"", 0.1, "dispatch_recv")  # type: ignore[union-attr]


def hang_in_python(_: Group) -> None:
    while True:
        time.sleep(1)


def hang_in_native_code(_: Group) -> None:
    ctypes.PyDLL(None).sleep(100)  # holds the interpreter's lock


WAYS: dict[str, Callable[[Group], object]] = {
    "raise": raise_with_cause,
    "raise unpicklable": raise_unpicklable,
    "time out": wait_for_nobody,
    "os._exit": lambda _: os._exit(3),
    "os._exit(0)": lambda _: os._exit(0),
    "sys.exit": lambda _: sys.exit(4),
    "sys.exit text": lambda _: sys.exit("a reason"),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "crash": lambda _: ctypes.string_at(0),
    "hang": hang_in_python,
    "hang in native code": hang_in_native_code,
}


def big(group: Group, data: bytes) -> bytes:
    return data + bytes([group.rank])


def environment(_: Group) -> tuple[dict[str, str], str]:
    return dict(os.environ), sys.stdin.read()


def run_inside(group: Group) -> list[int]:
    return run(square_sum, 2, group.rank + 1)


def make_unpicklable(_: Group) -> Any:
    return threading.Lock()


def return_unless(group: Group, rank: int) -> None:
    if group.rank == rank:
        hang_in_python(group)


def end_badly(group: Group, how: str) -> str:
    if group.rank == 1 and how == "exit code":
        atexit.register(lambda: os._exit(5))
    if group.rank == 1 and how == "signal":
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGKILL))
    if group.rank == 1 and how == "thread":
        threading.Thread(target=time.sleep, args=(100,)).start()
    return "fine"


def leave_without_close(group: Group) -> int:
    group.barrier()
    group.child()
    time.sleep(0.3 * group.rank)
    return group.rank


def wait_briefly(group: Group) -> str:
    if group.rank == 0:
        group.barrier(0.3)
    return "did not come"


def start_others(group: Group, how: str) -> int:
    """Leave a grandchild that would outlive everything."""
    sleeper = subprocess.Popen(["sleep", "100"])
    if how == "fork" and os.fork() == 0:
        time.sleep(100)  # holds this rank's pipe open
        os._exit(0)
    if how == "raise" and group.rank == 1:
        raise ValueError("on purpose")
    sleeper.returncode = 0  # no ResourceWarning: it is left behind on purpose
    return sleeper.pid
