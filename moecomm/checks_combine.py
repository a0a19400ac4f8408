"""What the halves of combine accept; see ``checks``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moecomm import arrays, dtypes
from moecomm.arrays import ArrayView, Device
from moecomm.checks import check_dtype, check_shape, check_weights, look
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError


def check_combine_inputs(
    cfg: MoeConfig,
    y: Any,
    expected_shape: tuple[int, ...],
    device: Device,
    *,
    stream: int | None = None,
) -> ArrayView:
    """Check the experts' outputs: ``recv.x``'s shape, ``combine_dtype``.

    Returns:
        The rows ``[rows, H]`` in order, any row stride; ``batched``'s experts lie one after the
        other.

    Raises:
        ConfigError: a shape, device or stride breaks its rule.
        DtypeError: the dtype does, or ``y`` is no array.
    """
    found = look("y", y, device, stream)
    check_dtype("y", found, (cfg.combine_dtype,), f"combine_dtype={cfg.combine_dtype!r}")
    check_shape("y", found, expected_shape, "recv.x's shape")
    return _flattened(arrays.kernel_ready(found, "y"), "y")


def check_combine_weights(
    cfg: MoeConfig,
    topk_weights: Any,
    num_rows: int,
    device: Device,
    *,
    given_at_dispatch: bool,
    stream: int | None = None,
) -> ArrayView | None:
    """Check the weights given to combine for ``num_rows`` tokens.

    Returns:
        ``[T, K]`` float32, any row stride; ``None``: those of dispatch hold, or none are used.

    Raises:
        ConfigError: given where they can no longer be applied, or needed and given nowhere.
        DtypeError: wrong dtype, or no array.
    """
    if topk_weights is not None and cfg.layout == "rank":
        raise ConfigError(
            "topk_weights given to combine: layout='rank' sums rows that the caller has already "
            "weighted; apply recv.topk_weights to y instead"
        )
    if topk_weights is not None and cfg.reduce == "sender":
        raise ConfigError(
            "topk_weights given to combine: reduce='sender' applies those given to dispatch"
        )
    if topk_weights is None:
        if cfg.layout != "rank" and not given_at_dispatch:
            raise ConfigError(
                "topk_weights=None: must be given to dispatch or to combine "
                f"(layout={cfg.layout!r} weights the experts' outputs)"
            )
        return None
    return check_weights(cfg, topk_weights, num_rows, device, stream)


def check_out(
    cfg: MoeConfig, out: Any, num_rows: int, accumulate: bool, device: Device
) -> ArrayView | None:
    """Check where combine writes: ``[T, H]`` of ``combine_dtype``; ``None`` stays ``None``.

    Raises:
        ConfigError: not writable in place as it lies, wrong shape or device, or
            ``accumulate=True`` with nothing to add to.
        DtypeError: wrong dtype, or no array.
    """
    if not isinstance(accumulate, bool):
        raise DtypeError(f"accumulate={accumulate!r}: must be True or False")
    if out is None:
        if accumulate:
            raise ConfigError("accumulate=True, out=None: must have an out to add to")
        return None
    found = look("out", out, device, None)
    check_dtype("out", found, (cfg.combine_dtype,), f"combine_dtype={cfg.combine_dtype!r}")
    check_shape("out", found, (num_rows, cfg.hidden), "[tokens, hidden]")
    if not found.writable:
        raise ConfigError("out is read-only: must be writable (numpy, torch or CuPy array)")
    found = arrays.plain_strides(found)
    if not arrays.fits_kernels(found):
        raise ConfigError(f"{arrays.misfit_text(found, 'out')}; results are written in place")
    row_bytes = cfg.hidden * dtypes.itemsize(found.dtype)
    if num_rows > 1 and found.strides_bytes[0] < row_bytes:
        raise ConfigError(
            f"out has a row stride of {found.strides_bytes[0]} bytes: must be at least "
            f"{row_bytes}, or its rows share memory"
        )
    return found


def _flattened(found: ArrayView, name: str) -> ArrayView:
    """``[..., H]`` as ``[rows, H]`` with one row stride."""
    *outer, hidden = found.shape
    if len(outer) == 1:
        return found
    experts, capacity = outer
    row, step = found.strides_bytes[-2:]
    if experts > 1 and capacity > 1 and found.strides_bytes[0] != capacity * row:
        if found.device != "cpu":
            raise ConfigError(
                f"{name} has strides {found.strides_bytes} bytes: its experts must lie one after "
                f"the other ({capacity} rows of {row} bytes); pass a contiguous copy"
            )
        found = arrays.copied(found)
        row, step = found.strides_bytes[-2:]
    elif capacity == 1:
        row = found.strides_bytes[0]
    return replace(found, shape=(experts * capacity, hidden), strides_bytes=(row, step))
