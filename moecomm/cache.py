"""Compiled kernels on disk: built once, shared by every process, never half a file.

An entry is ``<root>/<key>/<sha256 of the content><suffix>``. The name carries its own check, so a
file that was cut short or changed is found on every read, thrown away and built again, and there
is no second file that could disagree. Files appear by an atomic rename. Racing processes take a
lock per key, so that one builds while the others wait for its file.

Nothing here may stop a run that could also go on without a cache. A directory that cannot be
written, a full disk, a lock or a rename that the file system does not honour: the kernel is built
into a private temporary directory instead, with one warning that says why.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moecomm import cache_files, env
from moecomm.errors import CompileError
from moecomm.filelock import exclusive

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 300.0  # a builder that hangs or was stopped must not hang the others
VISIBLE_RETRIES: Final = 5  # NFS may answer "absent" from its attribute cache after a rename
VISIBLE_PAUSE_S: Final = 0.05

Build = Callable[[Path], None]


def key_of(*parts: bytes | str) -> str:
    """Return the hex SHA-256 of ``parts``; moving text from one part to the next changes it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default_root() -> Path | None:
    """Return where compiled kernels go; ``None`` when there is no home directory.

    ``MOECOMM_CACHE_DIR`` if set, else ``$XDG_CACHE_HOME/moecomm``, else ``~/.cache/moecomm``.
    """
    chosen = env.path("CACHE_DIR")
    if chosen is not None:
        return chosen
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "moecomm"
    try:
        home = Path.home()
    except RuntimeError:  # no HOME and no entry in the user database
        return None
    # A home that does not exist (`/nonexistent`, service accounts) is not ours to make.
    return home / ".cache" / "moecomm" if home.is_dir() else None


def default_cache() -> Cache:
    """Return this process's cache for the directory that the environment names now."""
    return _cache_at(default_root(), env.get("CACHE_DIR") is not None)


@functools.cache
def _cache_at(root: Path | None, trusted: bool) -> Cache:
    return Cache(root, trusted=trusted)


class Cache:
    """Files by key under ``root`` (``None``: the default directory).

    Args:
        root: the directory; made when first written to. The attribute is ``None`` when there is
            no home directory for the default.
        trusted: use ``root`` even when it belongs to another user. Compiled code is run, so the
            default directory must be the user's own; one that the user names is the user's word.
    """

    def __init__(self, root: Path | None = None, *, trusted: bool | None = None) -> None:
        self.root = root if root is not None else default_root()
        self._trusted = trusted if trusted is not None else root is not None
        self._private: Path | None = None
        self._private_owner = 0
        self._private_lock = threading.RLock()
        self._warned = False

    def get(self, key: str, suffix: str, build: Build, *, what: str = "the kernel") -> Path:
        """Return a complete file for ``key`` and ``suffix``, built when there is none.

        ``build(path)`` writes the file to ``path``, in a directory of its own; it is not called
        on a hit, and once only on a miss unless storage fails under it. ``what`` names the entry
        in messages.

        Raises:
            CompileError: there is no entry and ``MOECOMM_NO_COMPILE`` forbids building it.
            Exception: whatever ``build`` raises.
        """
        found = self.find(key, suffix)
        if found is not None:
            return found
        root, reason = self._usable()
        if env.flag("NO_COMPILE"):
            raise CompileError(
                f"{what} is not compiled yet and MOECOMM_NO_COMPILE=1 forbids compiling: "
                f"no valid {self.root or '(no cache)'}/{key}/*{suffix}. Run `moecomm compile` with "
                f"the same MOECOMM_CACHE_DIR first, or unset MOECOMM_NO_COMPILE"
            )
        if root is None:
            return self._get_private(key, suffix, build, reason)
        try:
            return self._build_shared(root / key, suffix, build)
        except _StorageError as error:
            return self._get_private(key, suffix, build, str(error), error.built)
        except OSError as error:  # from build() itself: storage, or a compiler that is missing
            return self._get_private(key, suffix, build, str(error))

    def find(self, key: str, suffix: str) -> Path | None:
        """Return the complete file of ``key`` and ``suffix``, or ``None``. Never builds."""
        root, _ = self._usable()
        if root is not None:
            found = cache_files.find(root / key, suffix)
            if found is not None:
                return found
        return cache_files.find(self._private / key, suffix) if self._private is not None else None

    def folder(self, key: str) -> Path:
        """Return a directory of ``key`` that exists and can be written, for files that their
        owner checks and publishes itself (numba's); a private one where ``get`` would use one."""
        root, reason = self._usable()
        if root is not None:
            try:
                (root / key).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = str(error)
            else:
                if os.access(root / key, os.W_OK | os.X_OK):
                    return root / key
                reason = f"{root / key} cannot be written"
        with self._private_lock:
            private = self._private_root() / key
            private.mkdir(exist_ok=True)
            self._warn(reason)
            return private

    def keep(self, key: str, name: str, text: str) -> Path | None:
        """Write ``text`` beside the entries of ``key`` for a person to read, e.g. a source that
        does not compile. Returns where; ``None`` when it cannot be written. Never an entry."""
        root, _ = self._usable()
        file = (root or self._private_root()) / key / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.debug("%s cannot be kept: %s", file, error)
            return None
        return file

    def _usable(self) -> tuple[Path | None, str]:
        """The directory, or ``None`` and the reason why there is none that may be used."""
        if self.root is None:
            return None, "there is no home directory"
        if self._trusted or sys.platform == "win32":
            return self.root, ""
        try:
            owner = self.root.stat().st_uid
        except OSError:
            return self.root, ""  # absent, or writing will tell
        if owner == os.geteuid():
            return self.root, ""
        return None, f"it belongs to user {owner}, this is user {os.geteuid()}"

    def _build_shared(self, folder: Path, suffix: str, build: Build) -> Path:
        """Build under the key's lock and publish; ``_StorageError`` when the directory fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=cache_files.STAGING, dir=folder))
        except OSError as error:
            raise _StorageError(str(error)) from error
        try:
            with exclusive(folder / f".lock{suffix}", LOCK_TIMEOUT_S) as ours:
                found = cache_files.find(folder, suffix)
                if found is not None:
                    return found
                if ours:
                    cache_files.sweep(folder, suffix, keep=staging)
                built = staging / f"out{suffix}"
                build(built)
                return self._publish(built, folder, suffix)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, built: Path, folder: Path, suffix: str) -> Path:
        target = folder / f"{cache_files.digest(built)}{suffix}"
        reason = f"{target} is not there after its rename"
        try:
            os.replace(built, target)
        except OSError as error:
            reason = str(error)
        for attempt in range(VISIBLE_RETRIES):
            found = cache_files.find(folder, suffix)
            if found is not None:
                return found
            if attempt + 1 < VISIBLE_RETRIES:
                time.sleep(VISIBLE_PAUSE_S)
        raise _StorageError(reason, self._keep(built))

    def _keep(self, built: Path) -> Path | None:
        """Move a build that could not be published out of the staging directory."""
        if not built.exists():
            return None
        kept = (
            Path(tempfile.mkdtemp(prefix=cache_files.STAGING, dir=self._private_root()))
            / built.name
        )
        shutil.move(built, kept)
        return kept

    def _get_private(
        self, key: str, suffix: str, build: Build, reason: str, built: Path | None = None
    ) -> Path:
        with self._private_lock:
            folder = self._private_root() / key
            found = cache_files.find(folder, suffix)
            if found is None:
                folder.mkdir(exist_ok=True)
                if built is None:
                    built = folder / f"out{suffix}"
                    build(built)
                found = folder / f"{cache_files.digest(built)}{suffix}"
                os.replace(built, found)
            self._warn(reason)
            return found

    def _private_root(self) -> Path:
        with self._private_lock:
            if self._private is None or self._private_owner != os.getpid():
                self._private = _private_directory()
                self._private_owner = os.getpid()
            return self._private

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "compiled kernels cannot be kept in %s (%s): this process keeps its own in a "
                "temporary directory and will compile them again next time; set "
                "MOECOMM_CACHE_DIR to a directory that can be written",
                self.root or "the default directory",
                reason,
            )


class _StorageError(Exception):
    """The shared directory failed; ``built`` is the finished file, if it could be saved."""

    def __init__(self, reason: str, built: Path | None = None) -> None:
        super().__init__(reason)
        self.built = built


def _private_directory() -> Path:
    """Make a directory of this process alone (mode 0700) that goes when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="moecomm-"))
    atexit.register(_remove_own, directory, os.getpid())
    return directory


def _remove_own(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the exit handler, not the directory
        shutil.rmtree(directory, ignore_errors=True)
