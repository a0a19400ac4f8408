"""``moecomm.run``: call a function on several ranks, each a process of this machine.

    import moecomm as mc

    def work(group, x):
        return group.rank * x

    if __name__ == "__main__":
        print(mc.run(work, 4, 10))        # [0, 10, 20, 30]

The guard is a rule: where the function is defined in the script itself, every rank's process
imports that script again, under the name ``__mp_main__``; without the guard it would start ranks
of its own, which is refused.

Ranks are new processes, never forks. They end with their caller, however it ends: by returning,
by an exception, by Ctrl-C, or by being killed (on Linux the kernel sees to it).
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moecomm.config import MAX_RANKS
from moecomm.errors import ConfigError
from moecomm.transport import check_name

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended. ``error`` is ``None`` exactly when the function returned ``value``."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None  # as in subprocess: -9 means killed by signal 9


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    transport: str = "auto",
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``fn(group, *args)`` on ``num_ranks`` local processes; return the results by rank.

    Args:
        fn: a function that a new process can import: defined at the top level of a module or of
            the script that runs. Lambdas and nested functions need the package cloudpickle.
        num_ranks: how many processes, 1 to 1024.
        args: passed to every rank, pickled.
        device: ``"cpu"`` or ``"cuda"``; becomes ``group.device``, which ``MoeComm`` reads.
        transport: becomes ``group.transport``, likewise.
        timeout_s: how long everything may take, from the start to the last process's end.

    Raises:
        ConfigError: a bad argument, or a function, argument or result that cannot be pickled.
        StateError: called while a rank imports the script, for want of the guard above.
        TransportError: a rank was killed by a signal or left by ``sys.exit`` or ``os._exit``; or
            ranks still ran after ``timeout_s``: the error's notes hold their stacks.
        Exception: what ``fn`` raised first on any rank, with its own type; its notes name the rank
            and hold that rank's traceback. The other ranks are terminated.
    """
    from moecomm.local_ranks import LocalRanks

    job = _check(fn, num_ranks, args, device, transport, timeout_s)
    with LocalRanks(job) as ranks:
        outcomes = ranks.finish(stop_at_first_error=True)
        failed = ranks.first_error
    if failed is not None:
        raise failed
    return [outcome.value for outcome in outcomes]


def outcomes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    transport: str = "auto",
    timeout_s: float = 60.0,
) -> list[Outcome]:
    """Like ``run``, but a failing rank ends nothing: return how each rank ended, by rank.

    This is for tests of failures: what do the survivors of a killed rank raise?
    """
    from moecomm.local_ranks import LocalRanks

    job = _check(fn, num_ranks, args, device, transport, timeout_s)
    with LocalRanks(job) as ranks:
        return ranks.finish(stop_at_first_error=False)


@dataclass(frozen=True, slots=True)
class Job:
    """The checked arguments of ``run``."""

    fn: Callable[..., Any]
    num_ranks: int
    args: tuple[Any, ...]
    device: str
    transport: str
    timeout_s: float


def _check(
    fn: object, num_ranks: object, args: tuple[Any, ...], device: str, transport: str, timeout: Any
) -> Job:
    if not callable(fn):
        raise ConfigError(f"fn={fn!r}: must be a function that takes a Group first")
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise ConfigError(f"num_ranks={num_ranks!r}: must be an integer from 1 to {MAX_RANKS}")
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"num_ranks={num_ranks}: must be an integer from 1 to {MAX_RANKS}")
    if device not in DEVICES:
        raise ConfigError(f"device={device!r}: must be one of {', '.join(map(repr, DEVICES))}")
    check_name(transport)
    seconds = math.nan
    with contextlib.suppress(TypeError, ValueError):
        seconds = float(timeout)
    if not seconds > 0:
        raise ConfigError(f"timeout_s={timeout!r}: must be a number of seconds above 0")
    return Job(fn, num_ranks, args, device, transport, seconds)


class _CallableModule(types.ModuleType):
    """``moecomm.run`` is the function, until somebody imports this module by its name, which
    makes Python put the module there. Then calling that does the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
