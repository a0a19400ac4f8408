"""The hierarchy of errors, what they say, and that they survive the way between processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from moecomm import errors
from moecomm.errors import (
    CodecError,
    CompileError,
    ConfigError,
    DtypeError,
    MoecommError,
    OutOfMemory,
    Overflow,
    PeerTimeout,
    StateError,
    TransportError,
    TransportUnavailable,
)

PARENTS = {
    ConfigError: (MoecommError, ValueError),
    DtypeError: (ConfigError, TypeError, ValueError),
    CodecError: (ConfigError, ValueError),
    StateError: (MoecommError, RuntimeError),
    CompileError: (MoecommError, RuntimeError),
    TransportUnavailable: (MoecommError, RuntimeError),
    TransportError: (MoecommError, RuntimeError),
    PeerTimeout: (TransportError,),
    OutOfMemory: (TransportError, MemoryError),
    Overflow: (TransportError,),
}

SAMPLES = [
    MoecommError("base"),
    ConfigError("top_k=9: too many"),
    DtypeError("x has dtype int8"),
    CodecError("codec Mine: encode: returns none"),
    StateError("closed"),
    CompileError("nope", log="line 3: error", source_path="kept.cu"),
    TransportUnavailable("no NIC"),
    TransportError("write failed", transport="verbs", peer=3, operation="write", code=-22),
    PeerTimeout("dispatch_recv", 5, 16, 11, rank=3, epoch=7),
    PeerTimeout("bootstrap", 1, 4, 3),
    Overflow(12, 100, 64, where="expert"),
    Overflow(1, 9, 8),
    OutOfMemory(4 << 30, 1 << 30, "GPU 1"),
]


@pytest.mark.parametrize(("error", "parents"), PARENTS.items(), ids=lambda p: str(p))
def test_hierarchy(error: type[Exception], parents: tuple[type[Exception], ...]) -> None:
    for parent in parents:
        assert issubclass(error, parent)


def test_every_error_derives_from_the_base() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    own = [c for c in classes if c.__module__ == "moecomm.errors"]
    assert len(own) == len(PARENTS) + 1
    assert all(issubclass(c, MoecommError) for c in own)


def test_connection_errors_are_not_value_errors() -> None:
    assert not issubclass(TransportError, ValueError)
    assert not issubclass(TransportUnavailable, TransportError)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: f"{type(e).__name__}-{e}")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_everything(error: MoecommError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: f"{type(e).__name__}-{e}")
def test_copying_keeps_everything(error: MoecommError) -> None:
    again = copy.copy(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_peer_timeout_says_who_waited_for_whom() -> None:
    error = PeerTimeout("dispatch_recv", 5, 16, 11, rank=3, epoch=7)
    assert str(error) == (
        "rank 3 timed out waiting for rank 5 in dispatch_recv (step 7): expected 16, saw 11"
    )
    assert (error.phase, error.peer, error.expected, error.seen) == ("dispatch_recv", 5, 16, 11)
    assert (error.rank, error.epoch, error.operation) == (3, 7, "dispatch_recv")


def test_overflow_says_what_would_help() -> None:
    error = Overflow(12, 100, 64, where="expert")
    assert "expert 12" in str(error)
    assert "100" in str(error)
    assert "max_recv_tokens" in str(error)
    assert (error.expert_or_rank, error.needed, error.capacity) == (12, 100, 64)


def test_compile_error_keeps_the_log() -> None:
    error = CompileError(
        "dispatch.cu does not compile", log="dispatch.cu(3): error", source_path="k"
    )
    assert (error.log, error.source_path) == ("dispatch.cu(3): error", "k")
    assert CompileError("only a message").log == ""
