"""Every error that moecomm raises.

    MoecommError
    ├── ConfigError (ValueError)           an argument breaks a rule; nothing was written
    │   ├── DtypeError (TypeError)         the argument has the wrong dtype or kind
    │   └── CodecError                     a codec's function breaks a rule
    ├── StateError (RuntimeError)          a call in the wrong order, or on something closed
    ├── CompileError (RuntimeError)        a kernel does not compile; holds the compiler's log
    ├── TransportUnavailable (RuntimeError)  a library, device or permission is missing here
    └── TransportError (RuntimeError)      communication failed
        ├── PeerTimeout                    a peer did not come in time
        ├── OutOfMemory (MemoryError)      a device has too little memory left
        └── Overflow                       more rows arrived than the receiver has room for

All of them pickle, because ``moecomm.run`` carries them from a rank's process to its caller.
"""

from __future__ import annotations

from typing import Any


class MoecommError(Exception):
    """Base of all errors of this package."""


class ConfigError(MoecommError, ValueError):
    """An argument breaks a rule. The message names the argument, its value and the rule."""


class DtypeError(ConfigError, TypeError):
    """An argument has a dtype, or is a kind of object, that is not accepted."""


class CodecError(ConfigError):
    """A function of a codec breaks a rule. The message names codec, function and rule."""


class StateError(MoecommError, RuntimeError):
    """A call came in the wrong order, or on a handle or communicator that is closed."""


class CompileError(MoecommError, RuntimeError):
    """A kernel does not compile.

    ``log`` is the compiler's output, ``source_path`` the kept source, where there is one.
    """

    def __init__(self, message: str, log: str = "", source_path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source_path = source_path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.log, self.source_path)


class TransportUnavailable(MoecommError, RuntimeError):
    """A transport cannot be used on this machine; the message says what is missing."""


class TransportError(MoecommError, RuntimeError):
    """Communication failed. Unknown details are ``None``."""

    def __init__(
        self,
        message: str,
        *,
        transport: str | None = None,
        peer: int | None = None,
        operation: str | None = None,
        code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.transport = transport
        self.peer = peer
        self.operation = operation
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class PeerTimeout(TransportError):
    """A peer did not do its part of ``phase`` within the configured time.

    ``expected`` and ``seen`` are what the wait compared (epochs, or counts), ``rank`` is who
    first noticed; ``rank`` and ``epoch`` are ``None`` outside a kernel. Between nodes ``peer`` may
    be this very rank: its own network broke or stood still, and ``__cause__`` says how.
    """

    def __init__(
        self,
        phase: str,
        peer: int,
        expected: int,
        seen: int,
        *,
        rank: int | None = None,
        epoch: int | None = None,
    ) -> None:
        who = "a rank" if rank is None else f"rank {rank}"
        step = "" if epoch is None else f" (step {epoch})"
        super().__init__(
            f"{who} timed out waiting for rank {peer} in {phase}{step}: "
            f"expected {expected}, saw {seen}",
            peer=peer,
            operation=phase,
        )
        self.phase = phase
        self.expected = expected
        self.seen = seen
        self.rank = rank
        self.epoch = epoch


class OutOfMemory(TransportError, MemoryError):
    """A buffer of ``needed`` bytes does not fit into the ``free`` bytes that ``where`` has left."""

    def __init__(self, needed: int, free: int, where: str) -> None:
        super().__init__(
            f"{where} has {free / 2**20:.1f} MiB free and {needed / 2**20:.1f} MiB are needed; "
            "lower max_tokens or in_flight, or set max_recv_tokens",
            operation="allocate",
        )
        self.needed = needed
        self.free = free
        self.where = where


class Overflow(TransportError):
    """A receiver would need ``needed`` rows and has ``capacity``.

    ``where`` says what ``expert_or_rank`` counts: ``"expert"`` (global expert id, ``batched``
    layout) or ``"rank"`` (``grouped`` and ``rank`` layouts). Every rank raises the same error.
    """

    def __init__(
        self, expert_or_rank: int, needed: int, capacity: int, *, where: str = "rank"
    ) -> None:
        super().__init__(
            f"{where} {expert_or_rank} would receive {needed} rows, "
            f"max_recv_tokens allows {capacity}",
            operation="dispatch",
        )
        self.expert_or_rank = expert_or_rank
        self.needed = needed
        self.capacity = capacity
        self.where = where


def _rebuild(
    cls: type[TransportError], args: tuple[Any, ...], state: dict[str, Any]
) -> TransportError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
