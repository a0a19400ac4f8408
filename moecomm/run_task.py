"""Pack a function and its arguments for processes that have not imported anything yet."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.errors import ConfigError
from moecomm.rank_main import Task

if TYPE_CHECKING:
    from moecomm.run import Job


def make_task(job: Job, store: tuple[str, int, str]) -> bytes:
    """The pickled ``Task`` of ``job``.

    Raises:
        ConfigError: the function, or an argument, cannot get to a new process.
    """
    call = _pickle_call(job.fn, job.args)
    module, path = _main_source() if b"__main__" in call else (None, None)
    if b"__main__" in call:
        # Classes that a rank's copy of the script defines come back under this name.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    task = Task(
        size=job.num_ranks,
        store=store,
        device=job.device,
        transport=job.transport,
        argv=list(sys.argv),
        main_module=module,
        main_path=path,
        module=_defining_module(job.fn),
        call=call,
    )
    return pickle.dumps(task)


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        call = pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  pickle raises anything
        return _cloudpickle(fn, args, str(error))
    if b"__main__" in call and _main_source() == (None, None):
        return _cloudpickle(fn, args, "it is defined in an interactive session, not in a file")
    return call


def _cloudpickle(fn: Callable[..., Any], args: tuple[Any, ...], why: str) -> bytes:
    """Pickle by value what has no name to import."""
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(_explain(fn, args, why)) from None
    try:
        data: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:  # noqa: BLE001  pickle raises anything
        raise ConfigError(_explain(fn, args, str(error))) from error
    return data


def _explain(fn: Callable[..., Any], args: tuple[Any, ...], why: str) -> str:
    for at, arg in enumerate(args):
        try:
            pickle.dumps(arg)
        except Exception as error:  # noqa: BLE001  pickle raises anything
            return f"args[{at}], a {type(arg).__qualname__}: must be picklable: {error}"
    return (
        f"fn={fn!r}: must be a function that a new process can import, at the top level of a "
        f"module or script ({why}); lambdas and nested functions need the package cloudpickle"
    )


def _main_source() -> tuple[str | None, str | None]:
    """How to import the caller's ``__main__``: by module name (``python -m``) or by path."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name), None
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        return None, None
    return None, str(Path(path).absolute())


def _defining_module(fn: Callable[..., Any]) -> tuple[str, str] | None:
    name = getattr(fn, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__":
        return None
    try:
        return str(name), inspect.getfile(module)
    except TypeError:  # built in
        return None
