"""Communicators by name, as compiled graphs know them, and which of their exchanges are open."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
import zlib
from dataclasses import dataclass
from typing import Any, Final

import torch

from moecomm import dtypes
from moecomm.comm import MoeComm
from moecomm.errors import StateError
from moecomm.handle import Handle, Received
from moecomm.layout import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Form:
    """Shapes and dtypes of what the ops return: all that tracing needs."""

    recv_shape: tuple[int, ...]
    recv_dtype: str
    num_scales: int
    num_local: int
    top_k: int
    by_rank: bool
    hidden: int
    combine_dtype: str

    @classmethod
    def of(cls, layout: Layout) -> Form:
        cfg = layout.cfg
        return cls(
            recv_shape=layout.recv_shape,
            recv_dtype=cfg.recv_dtype,
            num_scales=cfg.recv_scales,
            num_local=layout.num_local_experts,
            top_k=cfg.top_k,
            by_rank=cfg.layout == "rank",
            hidden=cfg.hidden,
            combine_dtype=cfg.combine_dtype,
        )

    def received(self, device: Any, weights_given: bool) -> tuple[Any, ...]:
        """Empty tensors like those that ``dispatch`` returns."""
        rows = self.recv_shape[:-1]

        def empty(shape: tuple[int, ...], dtype: str) -> Any:
            return torch.empty(shape, dtype=dtypes.torch_dtype(torch, dtype), device=device)

        weights = (*rows, self.top_k) if self.by_rank else rows
        return (
            empty(self.recv_shape, self.recv_dtype),
            empty((*rows, self.num_scales) if self.num_scales else (0,), "float32"),
            empty((self.num_local,), "int32"),
            empty((0,) if self.by_rank else (self.num_local + 1,), "int32"),
            empty((1,), "int32"),
            empty(weights if weights_given else (0,), "float32"),
            empty((*rows, self.top_k) if self.by_rank else (0,), "int32"),
            torch.empty(1, dtype=torch.int64, device="cpu"),
        )

    def result(self, num_rows: Any, device: Any) -> Any:
        """An empty tensor like the one that ``combine`` returns."""
        dtype = dtypes.torch_dtype(torch, self.combine_dtype)
        return torch.empty((num_rows, self.hidden), dtype=dtype, device=device)


class Exchanges:
    """Exchanges that ops have opened on one communicator. They live as long as it does.

    Ranks run the same ops in the same order, so what is open, and what is closed for want of a
    slot, is the same on all of them.
    """

    def __init__(self, comm: MoeComm, number: int) -> None:
        self.comm = comm
        self.form = Form.of(comm.layout)
        cfg = comm.config
        # torch keeps compiled graphs on disk, by their text: it shall tell apart what they were
        # traced with, which is the form, and what has gradients.
        traced = self.form, cfg.reduce, cfg.replicas, cfg.codec is None, cfg.num_experts
        self.name = f"{number}.{zlib.crc32(repr(traced).encode()):08x}"
        self._first_ticket = number << 40  # another communicator's tickets are none of ours
        self._open: dict[int, Handle] = {}  # by serial number
        self._lock = threading.RLock()

    def dispatch(self, *given: Any) -> Received:
        """``MoeComm.dispatch``, after closing the oldest exchange if there is no slot left."""
        with self._lock:
            while len(self._open) >= self.comm.config.in_flight:
                oldest = next(iter(self._open))
                logger.debug("exchange %d is closed: it was never combined", oldest)
                self._open.pop(oldest).close()
            recv = self.comm.dispatch(*given)
            self._open[recv.handle.serial] = recv.handle
            return recv

    def dispatch_zeros(self, topk_idx: Any, topk_weights: Any, num_tokens: Any) -> Received:
        """An exchange with this routing, for a combine that has none."""
        cfg = self.comm.config
        cast = cfg.coded is not None or cfg.dispatch_dtype.startswith("float8")
        dtype = dtypes.torch_dtype(torch, "bfloat16" if cast else cfg.dispatch_dtype)
        x = torch.zeros((topk_idx.shape[0], cfg.hidden), dtype=dtype, device=topk_idx.device)
        return self.dispatch(x, topk_idx, topk_weights, None, num_tokens)

    def ticket(self, handle: Handle) -> int:
        """What ``find`` knows it by."""
        return self._first_ticket + handle.serial

    def find(self, ticket: int) -> Handle | None:
        """The handle with this ticket, if it is one of ours and still open."""
        return self._open.get(ticket - self._first_ticket)

    def combine(self, y: Any, handle: Handle, topk_weights: Any, num_tokens: Any) -> Any:
        """``MoeComm.combine`` into a new tensor, zero where there is no token.

        Refused arguments leave the exchange as it was: nothing has been sent.
        """
        with self._lock:
            out = None
            if num_tokens is not None:
                out = self.form.result(handle.num_rows, y.device).zero_()
            out = self.comm.combine(y, handle, topk_weights, out)
            self._open.pop(handle.serial, None)
            return out

    def close(self, handle: Handle) -> None:
        """End an exchange that nobody combines."""
        with self._lock:
            self._open.pop(handle.serial, None)
            handle.close()


_named: Final[weakref.WeakValueDictionary[str, Exchanges]] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def exchanges_of(comm: MoeComm) -> Exchanges:
    """Those of ``comm``, made on the first call."""
    with _lock:
        exchanges = comm.torch_exchanges
        if not isinstance(exchanges, Exchanges):
            exchanges = comm.torch_exchanges = Exchanges(comm, next(_numbers))
            _named[exchanges.name] = exchanges
        return exchanges


def named(name: str) -> Exchanges:
    """The exchanges of that name.

    Raises:
        StateError: their communicator is gone.
    """
    exchanges = _named.get(name)
    if exchanges is None:
        raise StateError(f"comm={name!r}: no communicator of that name is alive in this process")
    return exchanges
