"""The processes behind ``moecomm.run``: start, watch, end.

They are started directly rather than through ``multiprocessing``: its spawn method leaves a
helper process behind, imports the caller's script even where nothing from it is used, and gives
no way to ask a stuck process for its stacks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any, Final

from moecomm.errors import ConfigError, TransportError
from moecomm.rank_main import DUMP_SIGNAL, RESULT, Report, refuse_in_main_import
from moecomm.run import Job, Outcome
from moecomm.run_task import make_task
from moecomm.store_server import StoreServer, loopback_host

POLL_S: Final = 0.05  # at most this late a silent death is noticed
EXIT_POLL_S: Final = 0.002  # the same for a rank that has closed its pipe and is about to end
TERMINATE_S: Final = 0.5  # between SIGTERM and SIGKILL
DUMP_S: Final = 1.0  # for stuck ranks to write their stacks
LOCAL_RANK: Final = "MOECOMM_LOCAL_RANK"
# More threads than cores would fight over them: each rank is one worker already.
ONE_THREAD: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class LocalRanks:
    """Context manager: starts the ranks; on leaving, none of their processes is left."""

    def __init__(self, job: Job) -> None:
        refuse_in_main_import()
        self._job = job
        self.first_error: BaseException | None = None

    def __enter__(self) -> LocalRanks:
        self._deadline = time.monotonic() + self._job.timeout_s
        self._cleanup = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def finish(self, *, stop_at_first_error: bool) -> list[Outcome]:
        """Wait until all ranks have ended, or one has failed, or the time is over."""
        while any(p.outcome is None for p in self._ranks):
            if self.first_error is not None and stop_at_first_error:
                break
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._time_out()
                break
            leaving = any(p.at_end and p.outcome is None for p in self._ranks)
            for key, _ in self._selector.select(min(left, EXIT_POLL_S if leaving else POLL_S)):
                key.data.read()
                if key.data.at_end:
                    self._selector.unregister(key.fileobj)
            for process in self._ranks:
                self._settle(process)
        return [p.outcome or Outcome(p.rank) for p in self._ranks]

    def _start(self) -> None:
        token = secrets.token_hex(8)
        server = self._cleanup.enter_context(StoreServer(loopback_host(), 0, job=token))
        task = make_task(self._job, (server.host, server.port, token))
        shared = self._cleanup.enter_context(_anonymous_file())
        shared.write(task)
        shared.flush()
        # Nothing is ever written: ranks that cannot ask the kernel to end them with their parent
        # read from it until this process, and with it the other end, is gone.
        life, self._life = os.pipe()
        self._cleanup.callback(os.close, self._life)
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
        self._ranks: list[_RankProcess] = []
        self._cleanup.callback(self._end_all)
        try:
            for rank in range(self._job.num_ranks):
                process = _RankProcess(rank, shared.fileno(), life, self._cleanup)
                self._ranks.append(process)
                self._selector.register(process.pipe, selectors.EVENT_READ, process)
        finally:
            os.close(life)

    def _settle(self, process: _RankProcess) -> None:
        if process.outcome is not None or not process.has_ended():
            return
        process.outcome = process.conclude(self._job.num_ranks)
        if self.first_error is None:
            self.first_error = process.outcome.error

    def _time_out(self) -> None:
        running = [p for p in self._ranks if p.outcome is None]
        names = ", ".join(str(p.rank) for p in running)
        error = TransportError(
            f"timeout_s={self._job.timeout_s:g} is over and rank{'s' * (len(running) > 1)} "
            f"{names} of {self._job.num_ranks} still run",
            operation="run",
            peer=running[0].rank,
        )
        for process, stacks in zip(running, _stacks_of(running), strict=True):
            error.add_note(f"rank {process.rank}:\n{stacks}")
            process.outcome = Outcome(process.rank, error=error)
        self.first_error = self.first_error or error

    def _end_all(self) -> None:
        for process in self._ranks:
            process.signal(signal.SIGTERM)
        give_up = time.monotonic() + TERMINATE_S
        while time.monotonic() < give_up and not all(p.has_ended() for p in self._ranks):
            time.sleep(0.005)
        for process in self._ranks:
            process.reap()


class _RankProcess:
    """One rank's process, its report as far as it has come, and how it ended."""

    def __init__(self, rank: int, task_fd: int, life_fd: int, cleanup: Any) -> None:
        self.rank = rank
        self.outcome: Outcome | None = None
        self.at_end = False  # of its report
        self._inbox = bytearray()
        self._ended = False
        self._dump: IO[bytes] = cleanup.enter_context(_anonymous_file())
        self.pipe, report_fd = os.pipe()
        cleanup.callback(os.close, self.pipe)
        os.set_blocking(self.pipe, False)
        fds = (task_fd, report_fd, self._dump.fileno(), life_fd)
        numbers = ", ".join(map(str, (*fds, rank, os.getpid())))
        paths = [p for p in sys.path if isinstance(p, str)]
        code = (
            f"import sys; sys.path[:] = {paths!r}; "
            f"from moecomm.rank_main import main; main({numbers})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            # A process group of its own: what a rank starts ends with it, and Ctrl-C reaches the
            # caller alone, which then ends the ranks.
            self._popen = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
                env=dict.fromkeys(ONE_THREAD, "1") | os.environ | {LOCAL_RANK: str(rank)},
            )
        finally:
            os.close(report_fd)

    def read(self) -> None:
        """Take what has come of the report."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 20):
                self._inbox += data
            self.at_end = True

    def has_ended(self) -> bool:
        """Whether the process has exited. It stays a zombie until ``reap``, so that its number,
        which is also its group's, cannot go to another process."""
        if not self._ended and hasattr(os, "waitid"):
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            self._ended = os.waitid(os.P_PID, self._popen.pid, flags) is not None
        elif not self._ended:
            self._ended = self._popen.poll() is not None
        return self._ended

    def conclude(self, num_ranks: int) -> Outcome:
        """The outcome of a process that has ended."""
        self.read()
        code = self.reap()
        report = self._report()
        value: Any = None
        error: BaseException | None = None
        if report is None or code < 0 or (report.value is not None and code != 0):
            error = self._died(code, report)
        elif report.exit_code is not None:
            code = report.exit_code
            error = self._died(code, None, report.traceback)
        elif report.value is None:
            error = self._raised(report, num_ranks)
        else:
            value, error = self._unpickle(report.value)
        return Outcome(self.rank, value, error, code)

    def signal(self, number: int) -> None:
        """Send to the process and everything that it started."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)

    def reap(self) -> int:
        """Kill whatever is left of the process and its group, and collect its exit code."""
        self.signal(signal.SIGKILL)
        return self._popen.wait()

    def ask_for_stacks(self) -> None:
        """Make the process write its stacks; it need not be able to run Python for that."""
        self._popen.send_signal(DUMP_SIGNAL)

    def stacks(self) -> str:
        """What faulthandler wrote: on request, or at a crash."""
        self._dump.seek(0)
        return self._dump.read().decode(errors="replace").strip()

    def _unpickle(self, data: bytes) -> tuple[Any, BaseException | None]:
        try:
            return pickle.loads(data), None
        except Exception as error:  # noqa: BLE001  classes that only the rank could import
            return None, ConfigError(f"the result of rank {self.rank} cannot be read: {error}")

    def _report(self) -> Report | None:
        if len(self._inbox) < RESULT.size:
            return None
        (length,) = RESULT.unpack_from(self._inbox)
        data = memoryview(self._inbox)[RESULT.size :]
        if len(data) < length:
            return None
        report: Report = pickle.loads(data[:length])
        return report

    def _died(self, code: int, report: Report | None, where: str = "") -> TransportError:
        when = "before its function returned" if report is None else "after its function returned"
        how = f"left with exit code {code}"
        if code < 0:
            how = f"was killed by {_signal_name(-code)}"
        error = TransportError(
            f"rank {self.rank} {how} {when}", peer=self.rank, operation="run", code=code
        )
        if where or (where := self.stacks()):
            error.add_note(f"rank {self.rank}:\n{where}")
        return error

    def _raised(self, report: Report, num_ranks: int) -> BaseException:
        error: Any = None
        if report.error is not None:
            error, _ = self._unpickle(report.error)
        if not isinstance(error, BaseException):
            error = TransportError(
                f"rank {self.rank} raised {report.text}", peer=self.rank, operation="run"
            )
        error.add_note(f"raised on rank {self.rank} of {num_ranks}:\n{report.traceback}")
        raised: BaseException = error
        return raised


def _stacks_of(processes: list[_RankProcess]) -> list[str]:
    for process in processes:
        process.ask_for_stacks()
    give_up = time.monotonic() + DUMP_S
    texts = [""] * len(processes)
    while time.monotonic() < give_up:
        time.sleep(0.05)
        before, texts = texts, [p.stacks() for p in processes]
        if all(texts) and texts == before:
            break
    return [text or "no stack: it did not react, or had not yet started" for text in texts]


def _anonymous_file() -> IO[bytes]:
    """A file without a name: nothing can be left of it, however this process ends."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("moecomm-run"), "w+b")
    return tempfile.TemporaryFile()  # noqa: SIM115  closed by the caller's ExitStack


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
