"""From what callers hand in to launch arguments: the quick way where it serves, else the long."""

from __future__ import annotations

from typing import Any

from moecomm import arguments, arrays, checks_combine, checks_dispatch
from moecomm.arrays import ArrayView, Kind
from moecomm.fast import FastTensors
from moecomm.handle import Handle
from moecomm.layout import Layout
from moecomm.runtime.base import Runtime
from moecomm.values import check_values


class Intake:
    """Looks at the arguments of one communicator's halves, before anything is written."""

    def __init__(self, layout: Layout, run: Runtime) -> None:
        self._cfg = layout.cfg
        self._layout = layout
        self._run = run
        # The CPU looks at values too, which takes views.
        fast = FastTensors(layout.cfg, layout.recv_shape, run.device)
        self._fast = None if run.synchronous else fast

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, x_scale: Any, num_tokens: Any, stream: Any
    ) -> tuple[tuple[int, ...], int, Kind, int, int, object]:
        """Values of ``DISPATCH_FIELDS``; rows of ``x``; the kind of array that the caller gets
        back; device code's number for ``x``'s element type; the stream; what to keep until the
        launch.

        Raises: see ``checks_dispatch.check_dispatch_inputs``.
        """
        if self._fast is not None:
            quick = self._fast.dispatch(x, topk_idx, topk_weights, x_scale, num_tokens)
            if quick is not None:
                words, rows, code = quick
                return words, rows, "torch", code, self._run.stream(stream, "torch"), None
        kind = arrays.kind_of(x, self._run.device)
        where = self._run.stream(stream, kind)
        given = checks_dispatch.check_dispatch_inputs(
            self._cfg,
            x,
            topk_idx,
            topk_weights,
            x_scale,
            num_tokens,
            self._run.device,
            stream=_asked(stream, kind, where),
        )
        if self._run.synchronous and self._cfg.check_values:
            check_values(self._cfg, given)
        self._wait_for(where, given.x, given.topk_idx, given.topk_weights)
        self._wait_for(where, given.x_scale, given.num_tokens)
        words = arguments.dispatch_words(given)
        return words, given.num_rows, given.kind, given.x_code, where, given

    def outputs(self, y: Any, handle: Handle, stream: Any) -> tuple[tuple[int, ...], int, object]:
        """Values of ``Y_FIELDS``, the stream, what to keep until the launch.

        Raises: see ``checks_combine.check_combine_inputs``.
        """
        where = self._run.stream(stream, handle.kind)
        quick = None if self._fast is None else self._fast.outputs(y)
        if quick is not None:
            return quick, where, None
        rows = checks_combine.check_combine_inputs(
            self._cfg,
            y,
            self._layout.recv_shape,
            self._run.device,
            stream=_asked(stream, handle.kind, where),
        )
        self._wait_for(where, rows)
        return arguments.row_words(rows), where, rows

    def returning(
        self, topk_weights: Any, out: Any, accumulate: bool, handle: Handle, stream: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], Any, int, object]:
        """Values of ``WEIGHT_FIELDS`` and of ``OUT_FIELDS``; the array that these describe, ``out``
        or a new one; the stream; what to keep until the launch.

        Raises: see ``checks_combine.check_combine_weights`` and ``check_out``.
        """
        where = self._run.stream(stream, handle.kind)
        weights, memory = self._weights(topk_weights, handle, stream, where)
        words, out = self._result(out, accumulate, handle, stream, where)
        return weights, words, out, where, memory

    def _weights(
        self, topk_weights: Any, handle: Handle, stream: Any, where: int
    ) -> tuple[tuple[int, ...], object]:
        """Values of ``WEIGHT_FIELDS`` and what to keep.

        Raises: see ``checks_combine.check_combine_weights``.
        """
        if topk_weights is None and handle.weights_given:
            return (0, 0), None
        if topk_weights is not None and self._fast is not None:
            quick = self._fast.weights(topk_weights, handle.num_rows)
            if quick is not None:
                return quick, None
        found = checks_combine.check_combine_weights(
            self._cfg,
            topk_weights,
            handle.num_rows,
            self._run.device,
            given_at_dispatch=handle.weights_given,
            stream=_asked(stream, handle.kind, where),
        )
        self._wait_for(where, found)
        return arguments.weight_words(found), found

    def _result(
        self, out: Any, accumulate: bool, handle: Handle, stream: Any, where: int
    ) -> tuple[tuple[int, ...], Any]:
        """Values of ``OUT_FIELDS`` and the array they describe: ``out``, or a new one.

        Raises: see ``checks_combine.check_out``.
        """
        if self._fast is not None and isinstance(accumulate, bool):
            if out is None and not accumulate and stream is None and handle.kind == "torch":
                quick, out = self._fast.new_result(handle.num_rows)
                return (*quick, 0), out
            found_quickly = self._fast.result(out, handle.num_rows)
            if found_quickly is not None:
                return (*found_quickly, accumulate), out
        device = self._run.device
        found = checks_combine.check_out(self._cfg, out, handle.num_rows, accumulate, device)
        if found is None:
            shape, dtype = (handle.num_rows, self._cfg.hidden), self._cfg.combine_dtype
            asked = _asked(stream, handle.kind, where)
            out = arrays.empty_like_kind(handle.kind, shape, dtype, device, stream=asked)
            found = arrays.view(out, "out")
        self._wait_for(where, found)
        return (*arguments.row_words(found), accumulate), out

    def _wait_for(self, where: int, *views: ArrayView | None) -> None:
        """Order the half after work that an array's producer named a stream for."""
        for found in views:
            if found is not None and found.stream is not None:
                self._run.join(found.stream, where)


def _asked(stream: Any, kind: Kind, where: int) -> int | None:
    """What conversions are told of the stream ``where``: nothing when it is torch's current."""
    return None if stream is None and kind == "torch" else where
