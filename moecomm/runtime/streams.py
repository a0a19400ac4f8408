"""CUDA streams: which one a half runs on, and order between halves on different ones."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from moecomm.arrays import Kind
from moecomm.cuda_driver import call, current
from moecomm.runtime.base import as_stream

LEGACY = 1  # CU_STREAM_LEGACY: another name of stream 0


class Streams:
    """The streams of one communicator, on GPU ``index``.

    Kernels of one communicator run one after the other. Where two halves are issued on different
    streams, the later waits for the earlier with an event, so that no order between the streams
    can make ranks wait for each other in a ring. What a stream captures is left alone: the
    caller's own dependencies go into the graph, and the caller orders its replays.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.last: int | None = None
        self._object: object = None  # or the stream might be gone when its event is recorded
        with current(index) as cu:
            self._cu = cu
            self._event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._torch_stream: Any = None  # torch's own look-up, without making objects

    def find(self, given: Any, kind: Kind) -> int:
        """The handle of ``given``; ``None``: the current stream of the library of the arrays."""
        if given is not None:
            handle = as_stream(given)
            return 0 if handle == LEGACY else handle
        if kind == "torch":
            if self._torch_stream is None:
                self._torch_stream = _torch_lookup()
            current_stream: int = self._torch_stream(self._index)
            return current_stream
        if kind == "cupy":
            cupy = sys.modules.get("cupy")
            if cupy is not None:
                with cupy.cuda.Device(self._index):
                    found = int(cupy.cuda.get_current_stream().ptr)
                return 0 if found == LEGACY else found
        return 0

    def enter(self, handle: int, owner: object = None) -> None:
        """Order what is launched next on ``handle`` after what was launched before.

        ``owner``: the object behind the handle, kept until another stream is used.
        """
        if handle == self.last:
            return
        with current(self._index):
            if self.captures(handle):
                return
            if self.last is not None:
                self.join(self.last, handle)
        self.last, self._object = handle, owner

    def join(self, earlier: int, later: int) -> None:
        """Let ``later`` wait for what ``earlier`` has now; not where either is being captured."""
        earlier = 0 if earlier == LEGACY else earlier
        if earlier == later:
            return
        with current(self._index) as cu:
            if self.captures(earlier) or self.captures(later):
                return
            call(cu.cuEventRecord, self._event, earlier)
            call(cu.cuStreamWaitEvent, later, self._event, 0)

    def close(self) -> None:
        """Idempotent."""
        if self._event is not None:
            with current(self._index) as cu:
                call(cu.cuEventDestroy, self._event)
            self._event = None
        self._object = None

    def captures(self, handle: int) -> bool:
        """Whether it is being captured; the device is current. Also true where the driver cannot
        say, which is so for stream 0 beside a capture."""
        status, *found = self._cu.cuStreamIsCapturing(handle)
        none = self._cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return int(status) != 0 or found[0] != none


def _torch_lookup() -> Any:
    """``index → handle`` of torch's current stream."""
    torch = importlib.import_module("torch")
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:  # what torch's own compiler calls; a Stream object costs 1.5 µs more
        return raw
    return lambda index: torch.cuda.current_stream(index).cuda_stream
