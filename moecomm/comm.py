"""``MoeComm``: dispatch and combine over a group of ranks, each in two halves."""

from __future__ import annotations

import logging
from typing import Any

from moecomm import arguments, runtime
from moecomm.agreement import agree
from moecomm.communicator import Communicator
from moecomm.config import MoeConfig
from moecomm.errors import Overflow
from moecomm.group import Group
from moecomm.handle import Handle, Received, State
from moecomm.intake import Intake
from moecomm.kernels import choice
from moecomm.kernels.args import (
    DISPATCH_FIELDS,
    OUT_FIELDS,
    STATUS_FAILURE,
    WEIGHT_FIELDS,
    Y_FIELDS,
)
from moecomm.layout import Layout
from moecomm.received import ReceivedViews

logger = logging.getLogger(__name__)


class MoeComm(Communicator):
    """Dispatch and combine for one MoE layer shape on every rank of ``group``.

    Construction is collective: configurations are compared, kernels compiled, memory shared. The
    halves only launch. All ranks call the halves in the same order.

    Args:
        cfg: the exchange; must be equal on all ranks.
        group: the ranks that take part.
        transport: how bytes reach a peer; ``"auto"``: the group's, which, if ``"auto"`` too, is
            picked, and the log says why.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; ``None``: what the group was started for.
        kernels: ``"cuda"``: CUDA C++; ``"numba"``: the same protocol in Python, with the
            ``flags`` wire; or the path of a Python file (or folder) of kernels over those, see
            docs/change-a-kernel.md. ``"auto"``: MOECOMM_KERNELS if set, else ``"cuda"``.

    Raises:
        ConfigError: an argument is wrong, or ranks differ in one (on every rank).
        TransportUnavailable: the transport cannot be used here.
        CompileError: a kernel does not compile.
        PeerTimeout: a rank did not come within ``cfg.timeout_s``.
    """

    def __init__(
        self,
        cfg: MoeConfig,
        group: Group,
        transport: str = "auto",
        device: str | None = None,
        kernels: choice.Kernels = "auto",
    ) -> None:
        super().__init__(cfg, group)
        transport = group.transport if transport == "auto" else transport
        # First of all: an argument that only this rank cannot use is then everybody's error.
        means = {
            "kernels": choice.identity(kernels),
            "transport": transport,
            "device": (device or group.device or "cpu").partition(":")[0],
        }
        agree(group, cfg, means, cfg.timeout_s)
        sources = choice.choose(kernels)
        self.config = cfg = choice.fitting(cfg, sources)
        transport = runtime.choose_transport(cfg, group, transport)
        remote = runtime.choose_remote(cfg, group, transport, device)
        self.layout = Layout(cfg, group.size, group.rank, remote)
        self._runtime = runtime.open_runtime(self.layout, group, transport, device, sources)
        try:
            self.device = self._runtime.device
            self._blocks = arguments.blocks(self.layout, self._runtime)
            self._trouble = self._runtime.statuses()[STATUS_FAILURE]
            self._intake = Intake(self.layout, self._runtime)
            self._views = ReceivedViews(self.layout, self._runtime)
            group.barrier(cfg.timeout_s)
        except BaseException:
            self._runtime.close()
            raise
        logger.info("rank %d of %d: ready on %s", group.rank, group.size, self.device)

    # ---- the four halves -----------------------------------------------------------------

    def dispatch_send(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        x_scale: Any = None,
        num_tokens: Any = None,
        stream: Any = None,
    ) -> Handle:
        """Send every token to the ranks that host its experts.

        Args:
            x: [T, H], ``dispatch_dtype``; for fp8 also bf16, fp16 or fp32, cast on the way; with a
                codec bf16, fp16 or fp32.
            topk_idx: [T, K] int32 or int64; -1: no expert. An expert named twice in a row gets
                the token once, and its weights add.
            topk_weights: [T, K] float32 (bf16 and fp16 are converted); needed here when
                ``reduce="sender"``, else here or at combine.
            x_scale: [T, S] float32, any strides; with fp8 ``x`` and ``scale_block``.
            num_tokens: int32 [1] on the device; rows from there on do not exist.
            stream: CUDA stream; ``None``: the current one.

        Raises:
            ConfigError: an argument breaks its rule; nothing was sent.
            StateError: ``in_flight`` handles are open, or the communicator is closed.
            PeerTimeout: a rank still has not read what this slot carried last.
        """
        with self._lock:
            self._check_usable("dispatch_send")
            words, num_rows, kind, code, where, _memory = self._intake.dispatch(
                x, topk_idx, topk_weights, x_scale, num_tokens, stream
            )
            handle = self._slots.open(self, num_rows, kind, topk_weights is not None)
            self._blocks[handle.slot].write(DISPATCH_FIELDS, words)
            self._launch("dispatch_send", handle, where, stream, code)
            return handle

    def dispatch_recv(self, handle: Handle, stream: Any = None) -> Received:
        """Wait for the tokens sent to this rank's experts.

        Raises:
            StateError: not the next half of this handle.
            PeerTimeout: a rank did not send in time.
            Overflow: ``max_recv_tokens`` is too small; the same on every rank.
        """
        with self._lock:
            self._check_usable("dispatch_recv")
            handle.expect(self, State.SENT, "dispatch_recv")
            where = self._runtime.stream(stream, handle.kind)
            self._launch("dispatch_recv", handle, where, stream)
            handle.state = State.RECEIVED
            return self._views.of(handle)

    def combine_send(self, y: Any, handle: Handle, stream: Any = None) -> None:
        """Send the experts' outputs back to the tokens' ranks.

        Args:
            y: ``combine_dtype``, shape and row order of ``recv.x``. In the ``rank`` layout each
                row is already weighted and summed over the local experts.

        Raises:
            ConfigError: ``y`` breaks a rule.
            StateError: not the next half of this handle.
        """
        with self._lock:
            self._check_usable("combine_send")
            handle.expect(self, State.RECEIVED, "combine_send")
            words, where, _memory = self._intake.outputs(y, handle, stream)
            self._blocks[handle.slot].write(Y_FIELDS, words)
            self._launch("combine_send", handle, where, stream)
            handle.state = State.RETURNED

    def combine_recv(
        self,
        handle: Handle,
        topk_weights: Any = None,
        out: Any = None,
        accumulate: bool = False,
        stream: Any = None,
    ) -> Any:
        """Wait for the experts' outputs and sum them: one row per token.

        Args:
            topk_weights: [T, K]; ``None``: those given to dispatch.
            out: [T, H] ``combine_dtype``, written in place; ``None``: a new array of ``x``'s kind.
            accumulate: add to ``out``, in fp32, rounded once.

        Returns:
            [T, H] of ``combine_dtype``. Tokens without experts are 0. Rows past ``num_tokens``
            are left as they are.

        Raises:
            ConfigError, StateError, PeerTimeout: as for the other halves.
        """
        with self._lock:
            self._check_usable("combine_recv")
            handle.expect(self, State.RETURNED, "combine_recv")
            given = self._intake.returning(topk_weights, out, accumulate, handle, stream)
            return self._sum(handle, given, stream)

    def _sum(
        self,
        handle: Handle,
        given: tuple[tuple[int, ...], tuple[int, ...], Any, int, object],
        stream: Any,
    ) -> Any:
        """``combine_recv`` of what ``Intake.returning`` has found to be good."""
        weights, words, out, where, _memory = given
        block = self._blocks[handle.slot]
        block.write(WEIGHT_FIELDS, weights)
        block.write(OUT_FIELDS, words)
        self._launch("combine_recv", handle, where, stream)
        self._slots.free(handle, State.CLOSED)
        return out

    # ---- both halves in one call -----------------------------------------------------------

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        x_scale: Any = None,
        num_tokens: Any = None,
        stream: Any = None,
    ) -> Received:
        """``dispatch_send`` and ``dispatch_recv``."""
        handle = self.dispatch_send(x, topk_idx, topk_weights, x_scale, num_tokens, stream)
        return self.dispatch_recv(handle, stream)

    def combine(
        self,
        y: Any,
        handle: Handle,
        topk_weights: Any = None,
        out: Any = None,
        accumulate: bool = False,
        stream: Any = None,
    ) -> Any:
        """``combine_send`` and ``combine_recv``. What either refuses is refused before ``y`` is
        sent, and the call may be repeated."""
        with self._lock:
            self._check_usable("combine_send")
            handle.expect(self, State.RECEIVED, "combine_send")
            given = self._intake.returning(topk_weights, out, accumulate, handle, stream)
            self.combine_send(y, handle, stream)
            self._check_usable("combine_recv")
            return self._sum(handle, given, stream)

    # ---- without combining -------------------------------------------------------------------

    def release(self, handle: Handle, stream: Any = None) -> None:
        """Close ``handle`` without combining; ``handle.close()`` is the same."""
        if self._forked:
            return  # a forked child: the handle is its parent's
        with self._lock:
            if handle.state in (State.CLOSED, State.FAILED) or self._closed or self._failure:
                return
            where = self._runtime.stream(stream, handle.kind)
            if handle.state is State.SENT and not self._drain(handle, where, stream):
                return
            if handle.state is not State.RETURNED:  # else combine_send has told the peers
                self._launch("release", handle, where, stream)
            self._slots.free(handle, State.CLOSED)

    # ---- inside ----------------------------------------------------------------------------------

    def _launch(
        self, stage: str, handle: Handle, where: int, stream: Any = None, input_code: int = 0
    ) -> None:
        block = self._blocks[handle.slot]
        self._runtime.launch(stage, block, handle.num_rows, input_code, where, stream)
        if self._runtime.synchronous:
            self.check()

    def _drain(self, handle: Handle, where: int, stream: Any) -> bool:
        """Receive rows that nobody wants. False: they overflow, and reporting that freed it."""
        try:
            self._launch("dispatch_recv", handle, where, stream)
        except Overflow:
            return False
        return True
