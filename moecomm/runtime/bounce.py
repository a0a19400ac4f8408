"""A bounce on a GPU: push and pull on streams of their own, beside the caller's.

``docs/protocol.md`` ("A bounce") says what they do and why nothing depends on when.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from moecomm import env
from moecomm.cuda_driver import attribute, call, current
from moecomm.kernels.args import ArgBlock, Args
from moecomm.kernels.gpu import GpuKernels
from moecomm.kernels.stages import PULL, PUSH, in_line
from moecomm.layout import Layout
from moecomm.remote import HALVES, WORD
from moecomm.runtime.streams import Streams

logger = logging.getLogger(__name__)

# What a sending stage is followed by: the number of the receiving half, and its pull.
_NEXT: Final = {"dispatch_send": (0, "dispatch_pull"), "combine_send": (1, "combine_pull")}

# A stream that waits takes one of the device's connections. With all of them taken no kernel and
# no copy of the process starts on any other stream, whatever the priorities, until a wait ends
# (H200, 2026-11-30: 8 of 8); one alone holds up nothing.
CONNECTIONS: Final = 8  # where CUDA_DEVICE_MAX_CONNECTIONS does not say
MOST_WAITING: Final = 4
_waiting: Final[Counter[int]] = Counter()  # GPU → streams of this process that may wait
_lock: Final = threading.Lock()


def _may_wait(index: int) -> bool:
    """Take leave for one more stream of GPU ``index`` to wait, if there is any."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    connections = int(text) if text.isdigit() else CONNECTIONS
    with _lock:
        if _waiting[index] >= min(MOST_WAITING, connections // 2):
            return False
        _waiting[index] += 1
        return True


def _no_more(index: int) -> None:
    """Give it back."""
    with _lock:
        _waiting[index] -= 1


def _nothing() -> None:
    """There was none to give back."""


class Bounce:
    """Launches a half's kernels for one communicator on GPU ``index``.

    A sending half is followed by push on a stream of its own, and, on another, by pull, which there
    waits without any multiprocessor until the mover says that all has come; few communicators of a
    process have the latter. A half that is being captured has both in line.

    Args:
        flags: address of the words that the mover shares.
    """

    def __init__(
        self, index: int, layout: Layout, kernels: GpuKernels, streams: Streams, flags: int
    ) -> None:
        assert layout.areas is not None
        slots = layout.cfg.in_flight
        self._index = index
        self._layout, self._kernels, self._streams = layout, kernels, streams
        self._landed = flags + layout.areas.flags["landed"].offset
        self._numbers = [0] * (slots * HALVES)  # of tickets, see ``Args.beside``
        self._blocks: dict[int, ArgBlock] = {}  # slot → arguments of what runs beside
        self._unjoined: set[int] = set()  # slots whose push no receiving half has waited for
        self._in_line = env.flag("BOUNCE_IN_LINE")
        self._leave: Callable[[], object] = _nothing  # gives back the leave to wait
        with current(index) as cu, contextlib.ExitStack() as undo:
            self._cu = cu
            self._at_least = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            # The default stream waits for none of them, and their few blocks are placed first.
            _, urgent = call(cu.cuCtxGetStreamPriorityRange)
            kind = cu.CUstream_flags.CU_STREAM_NON_BLOCKING

            def stream() -> int:
                made = int(call(cu.cuStreamCreateWithPriority, kind, urgent))
                undo.callback(call, cu.cuStreamDestroy, made)
                return made

            def event() -> Any:
                made = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                undo.callback(call, cu.cuEventDestroy, made)
                return made

            self._out, self._into = stream(), 0  # 0: there is none
            able = attribute(index, "CAN_USE_64_BIT_STREAM_MEM_OPS") and not self._in_line
            if able and _may_wait(index):
                self._leave = weakref.finalize(self, _no_more, index)
                self._into = stream()
            elif able:
                logger.info("GPU %d: enough streams wait: bytes come in in line", index)
            self._sent, self._pushed = event(), [event() for _ in range(slots)]
            self._undo = undo.pop_all()

    def launch(
        self, stage: str, block: ArgBlock, num_tokens: int, input_code: int, stream: int
    ) -> None:
        """Queue one half on ``stream``."""
        with current(self._index):
            self._queue(stage, block, num_tokens, input_code, stream)

    def _queue(
        self, stage: str, block: ArgBlock, num_tokens: int, input_code: int, stream: int
    ) -> None:
        """The device is current."""
        if self._in_line or self._streams.captures(stream):
            for name in in_line(self._layout, stage):
                code = input_code if name == stage else 0
                self._kernels.launch(name, block, num_tokens, code, stream)
            return
        if stage in PULL:
            self._join(block.args.slot, stream)
            self._kernels.launch(PULL[stage], block, 0, 0, stream)
        self._kernels.launch(stage, block, num_tokens, input_code, stream)
        if stage in PUSH:
            self._go_beside(stage, block, stream)

    def close(self) -> None:
        """Nothing runs, or waits, any more. Idempotent."""
        with current(self._index), self._undo:
            self._leave()

    def _go_beside(self, stage: str, block: ArgBlock, stream: int) -> None:
        cu, slot = self._cu, block.args.slot
        half, pull = _NEXT[stage]
        word = slot * HALVES + half
        self._numbers[word] += 1
        beside = self._block_of(slot, block)
        beside.args.beside = self._numbers[word]
        call(cu.cuEventRecord, self._sent, stream)
        call(cu.cuStreamWaitEvent, self._out, self._sent, 0)
        self._kernels.launch(PUSH[stage], beside, 0, 0, self._out)
        call(cu.cuEventRecord, self._pushed[slot], self._out)
        self._unjoined.add(slot)
        if self._into:
            # The event first: until then the mover has no ticket, and cannot let the stream go.
            call(cu.cuStreamWaitEvent, self._into, self._sent, 0)
            at, number = self._landed + WORD * word, self._numbers[word]
            call(cu.cuStreamWaitValue64, self._into, at, number, self._at_least)
            self._kernels.launch(pull, beside, 0, 0, self._into, in_order=True)

    def _join(self, slot: int, stream: int) -> None:
        """A receiving stage that waits for peers must not keep push from its room, for they may
        wait for that in turn."""
        if slot in self._unjoined:
            self._unjoined.remove(slot)
            call(self._cu.cuStreamWaitEvent, stream, self._pushed[slot], 0)

    def _block_of(self, slot: int, block: ArgBlock) -> ArgBlock:
        """Push and pull read nothing of a block that changes, so a copy is as good."""
        if slot not in self._blocks:
            self._blocks[slot] = ArgBlock(Args.from_buffer_copy(block.args))
        return self._blocks[slot]
