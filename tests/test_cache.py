"""The compiled-kernel cache: races, damage, storage that fails. Environment variables."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
from cache_worker import CONTENT, build_forever, race
from privileges import ordinary_folder

from moecomm import cache as cache_module
from moecomm import cache_files, env
from moecomm.cache import Cache, default_cache, default_root, key_of
from moecomm.errors import CompileError, ConfigError
from moecomm.filelock import exclusive

KEY = key_of("some kernel")


class Builder:
    """Writes ``content`` and counts its calls."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


@pytest.fixture
def build() -> Builder:
    return Builder()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# Hits and keys


def test_second_get_does_not_build(cache: Cache, build: Builder) -> None:
    first = cache.get(KEY, ".cubin", build)
    assert first.read_bytes() == CONTENT
    assert first.suffix == ".cubin"
    assert cache.get(KEY, ".cubin", build) == first
    assert Cache(cache.root).get(KEY, ".cubin", build) == first
    assert build.calls == 1
    assert cache.find(KEY, ".cubin") == first
    assert cache.find(KEY, ".json") is None


def test_suffixes_are_separate_entries(cache: Cache) -> None:
    cubin = cache.get(KEY, ".cubin", Builder(b"a"))
    report = cache.get(KEY, ".json", Builder(b"b"))
    assert (cubin.read_bytes(), report.read_bytes()) == (b"a", b"b")


def test_build_may_get_another_entry(cache: Cache) -> None:
    def outer(path: Path) -> None:
        cache.get(KEY, ".json", Builder(b"report"))
        path.write_bytes(b"cubin")

    cache.get(KEY, ".cubin", outer)
    assert cache.find(KEY, ".json") is not None


def test_key_separates_parts() -> None:
    keys = [key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", ""), key_of()]
    assert len(set(keys)) == len(keys)
    assert key_of("ab", b"c") == key_of(b"ab", "c")
    assert len(key_of("x")) == 64


def test_failing_build_leaves_nothing(cache: Cache) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        cache.get(KEY, ".cubin", fail)
    assert cache.root is not None
    assert [n for n in os.listdir(cache.root / KEY) if not n.startswith(".lock")] == []
    assert cache.get(KEY, ".cubin", Builder()).read_bytes() == CONTENT


def test_no_compile_names_the_entry(
    cache: Cache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    with pytest.raises(CompileError) as caught:
        cache.get(KEY, ".cubin", build, what="dispatch_send for sm_90")
    assert "dispatch_send for sm_90" in str(caught.value)
    assert f"{cache.root}/{KEY}/*.cubin" in str(caught.value)
    assert build.calls == 0
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "0")
    built = cache.get(KEY, ".cubin", build)
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "1")
    assert cache.get(KEY, ".cubin", build) == built


# Races


@pytest.mark.parametrize(("locks", "rounds"), [(True, 50), (False, 5)], ids=["locks", "no-locks"])
def test_sixteen_racing_processes(tmp_path: Path, locks: bool, rounds: int) -> None:
    """G01: one compile per key; where locks do not work, whole files all the same."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(16)
    log = tmp_path / "compiles"
    args = (tmp_path / "cache", log, start, rounds, locks)
    processes = [context.Process(target=race, args=args) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 16
    compiles = len(log.read_text().splitlines())
    assert compiles == rounds if locks else rounds <= compiles <= 16 * rounds


def test_threads_build_once(cache: Cache) -> None:
    calls: list[int] = []

    def slow_build(path: Path) -> None:
        calls.append(1)
        time.sleep(0.05)
        path.write_bytes(CONTENT)

    threads = [
        threading.Thread(target=cache.get, args=(KEY, ".cubin", slow_build)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_builder_killed_half_way(tmp_path: Path, build: Builder) -> None:
    root, ready = tmp_path / "cache", tmp_path / "ready"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=build_forever, args=(root, KEY, ready))
    process.start()
    while not ready.exists():
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    [leftover] = root.glob("*/.build-*")
    os.utime(leftover, (0, 0))
    assert Cache(root).get(KEY, ".cubin", build).read_bytes() == CONTENT
    assert list(root.glob("*/.build-*")) == []


def test_builder_that_hangs_does_not_hang_others(
    cache: Cache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.05)
    assert cache.root is not None
    (cache.root / KEY).mkdir(parents=True)
    with exclusive(cache.root / KEY / ".lock.cubin", 1.0) as held:
        assert held
        path = cache.get(KEY, ".cubin", build)
    assert path.read_bytes() == CONTENT
    assert build.calls == 1


# Damage


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped bit", "appended", "zeros"])
def test_damaged_entry_is_rebuilt(
    cache: Cache, build: Builder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """G04: a bad entry is a miss."""
    path = cache.get(KEY, ".cubin", build)
    path.write_bytes(
        {
            "truncated": CONTENT[:-1],
            "empty": b"",
            "flipped bit": bytes([CONTENT[0] ^ 1]) + CONTENT[1:],
            "appended": CONTENT + b"\0",
            "zeros": bytes(len(CONTENT)),
        }[damage]
    )
    assert cache.find(KEY, ".cubin") is None
    assert cache.get(KEY, ".cubin", build).read_bytes() == CONTENT
    assert build.calls == 2
    assert "damaged" in warnings_of(caplog)[0]


def test_damaged_entry_goes_even_when_the_new_build_differs(cache: Cache) -> None:
    path = cache.get(KEY, ".cubin", Builder(b"old"))
    path.write_bytes(b"ol")
    new = cache.get(KEY, ".cubin", Builder(b"new"))
    assert new.read_bytes() == b"new"
    assert not path.exists()


def test_a_directory_in_the_place_of_an_entry(cache: Cache, build: Builder) -> None:
    assert cache.root is not None
    (cache.root / KEY / f"{'0' * 64}.cubin").mkdir(parents=True)
    assert cache.get(KEY, ".cubin", build).read_bytes() == CONTENT


# Storage that fails


def test_network_file_system_hides_the_file_for_a_moment(
    cache: Cache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G02: the rename is lost, and the winner's file is not visible at once."""
    assert cache.root is not None
    folder = cache.root / KEY
    hidden_looks = iter(range(3))  # get, with the lock, first look after the rename
    real_find = cache_files.find

    def hide(where: Path, suffix: str) -> Path | None:
        return real_find(where, suffix) if next(hidden_looks, None) is None else None

    def lose(source: Path, target: Path) -> None:
        winner = folder / Path(target).name
        winner.write_bytes(CONTENT)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(cache_files, "find", hide)
    monkeypatch.setattr(os, "replace", lose)
    path = cache.get(KEY, ".cubin", build)
    assert path.parent == folder
    assert path.read_bytes() == CONTENT
    assert build.calls == 1


def test_network_file_system_never_shows_the_file(
    cache: Cache,
    build: Builder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """G02: the rename is lost and nobody's file appears: the own build is used, not redone."""
    real_replace = os.replace

    def lose(source: Path, target: Path) -> None:
        if cache.root in Path(target).parents:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", lose)
    path = cache.get(KEY, ".cubin", build)
    assert cache.root not in path.parents
    assert path.read_bytes() == CONTENT
    assert build.calls == 1
    assert "Directory not empty" in warnings_of(caplog)[0]


def check_private(cache: Cache, build: Builder, caplog: pytest.LogCaptureFixture) -> str:
    """The kernel is there, outside the cache, in a directory of this user; one warning."""
    path = cache.get(KEY, ".cubin", build)
    other = cache.get(key_of("other"), ".cubin", build)
    assert path.read_bytes() == other.read_bytes() == CONTENT
    assert cache.root is None or cache.root not in path.parents
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert cache.get(KEY, ".cubin", build) == path  # kept while the process lives
    [message] = warnings_of(caplog)
    assert "MOECOMM_CACHE_DIR" in message
    return message


def test_home_that_does_not_exist(
    build: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G03."""
    monkeypatch.delenv("MOECOMM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert default_root() is None
    message = check_private(Cache(), build, caplog)
    assert "no home directory" in message
    assert not Path("/nonexistent").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_directory_that_cannot_be_written(
    cache: Cache,
    build: Builder,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """G03, as the system reports it; the superuser would not be refused by modes."""
    real_mkdir = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if cache.root is not None and (self == cache.root or cache.root in self.parents):
            raise OSError(code, os.strerror(code), str(self))
        real_mkdir(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert os.strerror(code) in check_private(cache, build, caplog)


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_directory_modes(mode: int, build: Builder, caplog: pytest.LogCaptureFixture) -> None:
    """G03."""
    with ordinary_folder() as parent:
        root = parent / "cache"
        root.mkdir(mode=mode)
        assert "Permission denied" in check_private(Cache(root), build, caplog)


def test_entry_mode_000(build: Builder) -> None:
    """G03."""
    with ordinary_folder() as parent:
        cache = Cache(parent / "cache")
        cache.get(KEY, ".cubin", build).chmod(0)
        assert cache.get(KEY, ".cubin", build).read_bytes() == CONTENT
        assert build.calls == 2


def test_disk_full_during_the_build(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    def build(path: Path) -> None:
        if cache.root in path.parents:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(CONTENT)

    path = cache.get(KEY, ".cubin", build)
    assert path.read_bytes() == CONTENT
    [message] = warnings_of(caplog)
    assert "No space left" in message
    assert list((cache.root or path).glob("*/.build-*")) == []


def test_missing_compiler_is_not_taken_for_storage(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    def build(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "g++")

    with pytest.raises(FileNotFoundError, match=r"g\+\+"):
        cache.get(KEY, ".so", build)
    assert warnings_of(caplog) == []


def test_entry_that_cannot_be_read(
    cache: Cache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G03: an entry of another user, mode 0600."""
    path = cache.get(KEY, ".cubin", Builder(b"other"))
    real_digest = cache_files.digest

    def refuse(file: Path) -> str:
        if file == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_digest(file)

    monkeypatch.setattr(cache_files, "digest", refuse)
    assert cache.get(KEY, ".cubin", build).read_bytes() == CONTENT
    assert build.calls == 1


def test_read_only_cache_still_serves_hits(
    cache: Cache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.get(KEY, ".cubin", build)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert Cache(cache.root).get(KEY, ".cubin", build) == path
    assert build.calls == 1


def test_default_directory_of_another_user_is_not_trusted(
    tmp_path: Path,
    build: Builder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = Cache(tmp_path / "cache")
    planted = named.get(KEY, ".cubin", Builder(b"planted"))
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert named.find(KEY, ".cubin") == planted  # the user named it: the user's word
    default = Cache(tmp_path / "cache", trusted=False)
    assert f"belongs to user {owner}" in check_private(default, build, caplog)


def test_private_directory_goes_with_its_process_only(
    tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "private"
    directory.mkdir()
    cache_module._remove_own(directory, os.getpid() + 1)  # the exit handler in a forked child
    assert directory.exists()
    cache_module._remove_own(directory, os.getpid())
    assert not directory.exists()


# Where it is, and the environment table


def test_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MOECOMM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == tmp_path / ".cache" / "moecomm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # must be ignored by the standard
    assert default_root() == tmp_path / ".cache" / "moecomm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "moecomm"
    monkeypatch.setenv("MOECOMM_CACHE_DIR", "~/kernels")
    assert default_root() == tmp_path / "kernels"
    assert default_cache() is default_cache()
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "other"))
    assert default_cache().root == tmp_path / "other"


def test_environment_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        env.get("UNKNOWN")
    monkeypatch.setenv("MOECOMM_CXX", "")
    assert env.get("CXX") is None
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "Yes")
    assert env.flag("NO_COMPILE")
    monkeypatch.setenv("MOECOMM_NO_COMPILE", "maybe")
    with pytest.raises(ConfigError, match="MOECOMM_NO_COMPILE='maybe': must be 1 or 0"):
        env.flag("NO_COMPILE")
    monkeypatch.setenv("MOECOMM_CACHE_DIR", "~no_such_user_here/x")
    with pytest.raises(ConfigError, match="no such home directory"):
        env.path("CACHE_DIR")


@pytest.mark.parametrize("text", ["x", "0", "65", "1.5"])
def test_environment_integer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_CXX", "8")
    assert env.integer("CXX", 1, 64) == 8
    monkeypatch.setenv("MOECOMM_CXX", text)
    with pytest.raises(ConfigError, match=f"MOECOMM_CXX='{text}': must be an integer from 1"):
        env.integer("CXX", 1, 64)
    monkeypatch.delenv("MOECOMM_CXX")
    assert env.integer("CXX", 1) is None


def test_every_variable_has_a_meaning() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    for variable in env.VARIABLES:
        assert variable.meaning
        assert variable.default
