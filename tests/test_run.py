"""``moecomm.run``: results, errors, ends of every kind, and that no process is left."""

from __future__ import annotations

import operator
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from rank_functions import (
    CarriesData,
    big,
    describe,
    end_badly,
    environment,
    leave_without_close,
    make_unpicklable,
    misbehave,
    return_unless,
    run_inside,
    square_sum,
    start_others,
    wait_briefly,
)

from moecomm import run_task
from moecomm.errors import ConfigError, PeerTimeout, TransportError
from moecomm.group import Group
from moecomm.run import outcomes, run

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test of this file ends with no process, thread or descriptor more than before."""
    mark = processes.new_mark()
    monkeypatch.setenv(processes.VARIABLE, mark)
    threads, descriptors = threading.active_count(), _descriptors()
    yield
    if sys.platform == "linux":
        assert processes.wait_until_gone(mark) == []
    assert threading.active_count() == threads
    assert _descriptors() == descriptors


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def enough(seconds: float) -> float:
    """A time-out in which ranks surely start on this machine, as busy as it is now."""
    start = time.monotonic()
    run(describe, 3)
    return max(seconds, 5 * (time.monotonic() - start))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# Results


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_results_come_by_rank(num_ranks: int) -> None:
    results = run(describe, num_ranks, "x", [1], device="cpu", transport="loopback")
    assert results == [(r, num_ranks, "cpu", "loopback", ("x", [1])) for r in range(num_ranks)]


def test_ranks_can_exchange() -> None:
    assert run(square_sum, 4, 10) == [140] * 4


def test_the_package_offers_the_function() -> None:
    import moecomm as mc

    assert mc.run(square_sum, 2, 1) == [1, 1]
    code = (
        "import moecomm.run, moecomm as mc, operator; print(mc.run(operator.attrgetter('size'), 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1]\n"


def test_any_callable_that_pickles_will_do() -> None:
    assert run(operator.attrgetter("size"), 2) == [2, 2]


def test_arguments_and_results_may_be_large() -> None:
    data = os.urandom(20 << 20)
    assert run(big, 2, data) == [data + b"\0", data + b"\1"]


def test_start_up_is_cheap() -> None:
    """Four ranks start in a second on two cores; counted in work, as other tests run beside it."""

    def work() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = work()
    run(operator.attrgetter("rank"), 4)
    assert work() - before < 1.5


def test_ranks_import_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "light_module.py").write_text(
        "import sys\ndef loaded(group):\n    return sorted(sys.modules)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import light_module  # type: ignore[import-not-found]

    names = run(light_module.loaded, 1)[0]
    heavy = {"torch", "numba", "cuda", "cupy", "typer", "rich", "multiprocessing", "pytest"}
    assert not heavy & set(names)


def test_ranks_get_one_thread_each_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    [(environ, stdin)] = run(environment, 1)
    assert (environ["OMP_NUM_THREADS"], environ["MKL_NUM_THREADS"]) == ("1", "3")
    assert stdin == ""
    assert "OMP_NUM_THREADS" not in os.environ


def test_runs_may_overlap_and_come_from_threads() -> None:
    results: dict[int, list[int]] = {}

    def work(n: int) -> None:
        results[n] = run(square_sum, 2, n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {1: [1, 1], 2: [2, 2]}


def test_a_rank_may_run_ranks() -> None:
    assert run(run_inside, 2) == [[1, 1], [2, 2]]


# What fn may be


def script(tmp_path: Path, text: str, *how: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``text`` as a script; ``how``: instead of its path."""
    path = tmp_path / "script_under_test.py"
    path.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *(how or (str(path), "an argument"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        input=textwrap.dedent(text) if how == ("-",) else None,
    )
    assert done.returncode == code, done.stderr
    return done


SCRIPT = """
import sys
from moecomm.run import run

class Mine:
    def __init__(self, value):
        self.value = value

class MyError(Exception):
    pass

def work(group, mine):
    if mine.value < 0:
        raise MyError(mine.value)
    return Mine((mine.value + group.rank, sys.argv[1:]))

if __name__ == "__main__":
    results = run(work, 2, Mine(10))
    assert all(type(r) is Mine for r in results)
    print([r.value for r in results])
    try:
        run(work, 2, Mine(-1))
    except MyError as error:
        print("MyError", error)
"""


def test_fn_may_be_defined_in_the_script(tmp_path: Path) -> None:
    done = script(tmp_path, SCRIPT)
    assert done.stdout == "[(10, ['an argument']), (11, ['an argument'])]\nMyError -1\n"


def test_fn_may_be_defined_in_a_module_that_is_run(tmp_path: Path) -> None:
    done = script(tmp_path, SCRIPT, "-m", "script_under_test")
    assert done.stdout == "[(10, []), (11, [])]\nMyError -1\n"


def test_a_script_without_its_guard_is_told(tmp_path: Path) -> None:
    text = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    done = script(tmp_path, text, code=1)
    assert "StateError: moecomm.run was called while a rank imports the script" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_the_script_is_not_imported_without_need(tmp_path: Path) -> None:
    text = """
        import operator
        from moecomm.run import run
        print("imported")
        print(run(operator.attrgetter("rank"), 2))
    """
    assert script(tmp_path, text).stdout == "imported\n[0, 1]\n"


def test_an_interactive_function_is_told(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('not here')\n")
    done = script(tmp_path, SCRIPT, "-", code=1)
    assert "ConfigError: fn=<function work" in done.stderr
    assert "interactive session" in done.stderr
    assert "cloudpickle" in done.stderr


def test_fn_may_come_from_a_file_that_no_path_leads_to(tmp_path: Path) -> None:
    import importlib.util

    path = tmp_path / "somewhere.py"
    path.write_text("def work(group):\n    return __name__, group.rank\n")
    spec = importlib.util.spec_from_file_location("unreachable_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["unreachable_module"] = module
    spec.loader.exec_module(module)
    try:
        assert run(module.work, 2) == [("unreachable_module", 0), ("unreachable_module", 1)]
    finally:
        del sys.modules["unreachable_module"]


def test_lambdas_need_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def nested(group: Group) -> int:
        return group.rank

    for fn in (lambda group: group.rank, nested):
        with pytest.raises(ConfigError, match="top level of a module or script .* cloudpickle$"):
            run(fn, 2)


FAKE_CLOUDPICKLE = """
import marshal, pickle, types

class ByValue:
    def __init__(self, fn):
        self.code = marshal.dumps(fn.__code__)
    def __call__(self, *args):
        return types.FunctionType(marshal.loads(self.code), {})(*args)

def dumps(call):
    return pickle.dumps((ByValue(call[0]), call[1]))
"""


def test_lambdas_work_with_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cloudpickle.py").write_text(FAKE_CLOUDPICKLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    assert run(lambda group, x: group.rank + x, 2, 5) == [5, 6]
    monkeypatch.delitem(sys.modules, "cloudpickle")


def test_what_does_not_pickle_is_named() -> None:
    with pytest.raises(ConfigError, match=r"args\[1\], a lock: must be picklable"):
        run(describe, 2, 1, threading.Lock())
    with pytest.raises(ConfigError, match=r"result of rank \d, a lock, cannot be pickled"):
        run(make_unpicklable, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("not callable", 2), "fn='not callable'"),
        ((describe, 0), "num_ranks=0"),
        ((describe, -1), "num_ranks=-1"),
        ((describe, 1025), "num_ranks=1025"),
        ((describe, True), "num_ranks=True"),
        ((describe, 2.0), "num_ranks=2.0"),
    ],
)
def test_positional_arguments_are_checked(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(*arguments)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": None}, "timeout_s=None"),
    ],
)
def test_keywords_are_checked(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(describe, 2, **keywords)


# Failures


def test_an_error_keeps_its_type_and_brings_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(CarriesData, match="the effect") as got:
        run(misbehave, 3, "raise")
    assert time.monotonic() - start < 10, "the other ranks were waited for"
    assert got.value.data == {"a": 1}
    text = notes(got.value)
    assert "raised on rank 1 of 3" in text
    assert "in raise_with_cause" in text
    assert "KeyError: 'the cause'" in text


def test_an_error_that_does_not_pickle_is_described() -> None:
    with pytest.raises(TransportError, match=r"rank 1 raised .*DoesNotPickle: 1 and 2") as got:
        run(misbehave, 2, "raise unpicklable")
    assert "in raise_unpicklable" in notes(got.value)
    assert got.value.peer == 1


def test_our_errors_keep_their_fields() -> None:
    with pytest.raises(PeerTimeout) as got:
        run(misbehave, 2, "time out")
    error = got.value
    assert (error.phase, error.peer, error.expected, error.seen) == ("dispatch_recv", 1, 2, 1)
    assert error.rank == 0 or error.peer == 1


@pytest.mark.parametrize(
    ("how", "text", "code"),
    [
        ("os._exit", "rank 1 left with exit code 3 before its function returned", 3),
        ("os._exit(0)", "rank 1 left with exit code 0 before", 0),
        ("sys.exit", "rank 1 left with exit code 4 before", 4),
        ("sys.exit text", "rank 1 left with exit code 1 before", 1),
        ("kill", r"rank 1 was killed by signal 9 \(SIGKILL\) before", -9),
        ("terminate", r"rank 1 was killed by signal 15 \(SIGTERM\) before", -15),
        ("interrupt", r"rank 1 was killed by signal 2 \(SIGINT\) before", -2),
        ("crash", r"rank 1 was killed by signal 11 \(SIGSEGV\) before", -11),
    ],
)
def test_a_rank_that_leaves_is_named(how: str, text: str, code: int) -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match=text) as got:
        run(misbehave, 2, how)
    assert time.monotonic() - start < 10
    assert (got.value.peer, got.value.code, got.value.operation) == (1, code, "run")
    if how == "crash":
        assert "in string_at" in notes(got.value)
    if how == "sys.exit text":
        assert "a reason" in notes(got.value)


@pytest.mark.parametrize("how", ["hang", "hang in native code"])
def test_ranks_that_hang_are_named_with_their_stacks(how: str) -> None:
    timeout_s = enough(1.0)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"timeout_s=.* is over and ranks 0, 1 of 2") as got:
        run(misbehave, 2, how, timeout_s=timeout_s)
    assert timeout_s <= time.monotonic() - start < timeout_s + 5
    assert f"timeout_s={timeout_s:g} is" in str(got.value)
    text = notes(got.value)
    assert "rank 0:" in text
    assert "in barrier" in text
    assert how.replace(" ", "_") in text


def test_only_the_ranks_that_still_run_are_named() -> None:
    timeout_s = enough(1.0)
    with pytest.raises(TransportError, match="is over and rank 2 of 3 still run") as got:
        run(return_unless, 3, 2, timeout_s=timeout_s)
    assert got.value.peer == 2


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit code", "rank 1 left with exit code 5 after its function returned"),
        ("signal", r"rank 1 was killed by signal 9 \(SIGKILL\) after its function returned"),
        ("thread", "rank 1 of 2 still run"),
    ],
)
def test_an_end_that_goes_wrong_is_not_hidden(how: str, text: str) -> None:
    timeout_s = enough(1.0) if how == "thread" else 20.0
    with pytest.raises(TransportError, match=text):
        run(end_badly, 2, how, timeout_s=timeout_s)


def test_leaving_without_close_is_no_error() -> None:  # D09
    start = time.monotonic()
    assert run(leave_without_close, 3) == [0, 1, 2]
    assert time.monotonic() - start < 5


def test_outcomes_let_the_others_finish() -> None:
    got = outcomes(misbehave, 3, "kill", 2, timeout_s=enough(1.0))
    assert [o.rank for o in got] == [0, 1, 2]
    assert got[2].exit_code == -9
    assert "killed by signal 9" in str(got[2].error)
    assert all("still run" in str(o.error) for o in got[:2])
    got = outcomes(wait_briefly, 2)
    assert [type(o.error) for o in got] == [PeerTimeout, type(None)]
    assert (got[0].value, got[1].value) == (None, "did not come")


# No process is left (see the fixture, which checks every test)


@linux_only
@pytest.mark.parametrize("how", ["return", "fork", "raise"])
def test_what_ranks_have_started_ends_with_them(how: str) -> None:
    start = time.monotonic()
    try:
        assert len(run(start_others, 2, how)) == 2
    except ValueError:
        assert how == "raise"
    assert time.monotonic() - start < 10


INTERRUPTED = r"""
import os, sys, time
from moecomm.run import run

def work(group):
    group.barrier()
    os.write(1, b"started\n")
    time.sleep(100)

if __name__ == "__main__":
    try:
        run(work, 3)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(9)
"""


@linux_only
@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        (signal.SIGINT, False, 9),
        (signal.SIGINT, True, 9),
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["Ctrl-C to the caller", "Ctrl-C to all", "SIGTERM", "SIGKILL"],
)
def test_ranks_end_with_their_caller(
    number: int, whole_group: bool, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "interrupted.py"
    path.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as caller:
        assert caller.stdout is not None
        for _ in range(3):
            assert caller.stdout.readline() == "started\n"
        mark = os.environ[processes.VARIABLE]
        assert len(processes.marked(mark)) == 4
        (os.killpg if whole_group else os.kill)(caller.pid, number)
        assert caller.wait(10) == code
        assert processes.wait_until_gone(mark, 5) == []
        out, err = caller.communicate()
        assert out == ("interrupted\n" if code == 9 else "")
        assert "Traceback" not in err


def test_a_rank_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    text = """
        from moecomm.run import run

        def meet(group):
            group.barrier(30)

        if __name__ == "__main__":
            run(meet, 2)
    """
    assert "ResourceWarning" not in script(tmp_path, text).stderr


def test_many_runs_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = threading.active_count(), _descriptors()
    for n in range(3):
        run(square_sum, 2, n)
        with pytest.raises(TransportError):
            run(misbehave, 2, "kill")
    assert (threading.active_count(), _descriptors()) == before
    assert os.listdir(tmp_path) == []


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = subprocess.Popen, []

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no more processes")
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        run(square_sum, 3, 1)
    assert len(calls) == 2


def test_the_task_names_how_to_import_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert run_task._main_source() == (None, None)
    main.__file__ = __file__
    assert run_task._main_source() == (None, str(Path(__file__).absolute()))
    main.__file__ = "<stdin>"
    assert run_task._main_source() == (None, None)
