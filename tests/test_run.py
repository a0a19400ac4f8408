"""``moecomm.run``: what it takes and gives; see ``test_run_ends`` for errors and ends."""

from __future__ import annotations

import operator
import os
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from rank_functions import (
    big,
    describe,
    environment,
    make_unpicklable,
    run_inside,
    square_sum,
)

from moecomm import run_task
from moecomm.errors import ConfigError
from moecomm.group import Group
from moecomm.run import run

pytestmark = pytest.mark.usefixtures("nothing_left")


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


def test_the_task_names_how_to_import_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert run_task._main_source() == (None, None)
    main.__file__ = __file__
    assert run_task._main_source() == (None, str(Path(__file__).absolute()))
    main.__file__ = "<stdin>"
    assert run_task._main_source() == (None, None)
