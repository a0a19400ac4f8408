"""What ``MoeComm`` needs of a device: memory, launches, and a look at what kernels reported."""

from __future__ import annotations

from typing import Any, Final, Protocol

from moecomm.arrays import Device, Kind
from moecomm.errors import DtypeError, TransportError
from moecomm.kernels.args import ArgBlock, Status

POISON: Final = 0x7F  # a NaN in every float format there is


class Runtime(Protocol):
    """One rank's memory and kernels on one device."""

    device: Device
    memory_bytes: int
    synchronous: bool  # launches have finished, and reported, when `launch` returns
    local: int  # address of the rank's own workspace
    symmetric: int  # ... of what peers write to
    remote_flags: int  # ... of the words that a mover of remote peers' bytes shares; 0: none are
    remote_bulk: int  # ... of the areas where kernels pack and find bytes; 0: none
    network_bulk: int  # ... of those that a mover moves bytes from and to: mostly the same ones
    status_address: int  # ... of what kernels write status records to
    owner: object  # keeps the workspace alive; arrays handed to the caller hold it

    def stream(self, given: Any, kind: Kind, /) -> int:
        """The handle of the stream that a half runs on: ``given``, or the caller's current one
        in the library of its arrays. 0 on a CPU."""

    def join(self, earlier: int, later: int) -> None:
        """Let what comes on stream ``later`` wait for what stream ``earlier`` has now."""

    def launch(
        self,
        stage: str,
        block: ArgBlock,
        num_tokens: int,
        input_code: int,
        stream: int,
        stream_object: object = None,
    ) -> None:
        """Run one stage after all that were launched before. ``block`` may be reused at once.

        ``input_code``: element type of ``x`` (dispatch_send). ``stream_object``: kept alive while
        the stream is needed.
        """

    def statuses(self) -> list[Status]:
        """The three status records, where kernels write them."""

    def read_words(self, region: str) -> list[int]:
        """The 8-byte words of a region of the workspace, after all launches so far."""

    def failure(self) -> TransportError | None:
        """What has happened to the host's part of the exchange, where that failed first."""

    def close(self) -> None:
        """Let go of memory and kernels. Idempotent, not collective."""


def as_stream(stream: Any) -> int:
    """A CUDA stream as a handle: an int, or what torch, CuPy or cuda.core call a stream.

    Raises:
        DtypeError: it is none of them.
    """
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(value)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise DtypeError(f"stream={stream!r}: must be an int, or a torch, CuPy or CUDA stream")
    return int(protocol()[1])
