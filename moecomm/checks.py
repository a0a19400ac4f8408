"""What the halves accept: every rule on shape, dtype, device and stride, before any write.

Values are not looked at here: expert numbers are checked on the device, where they are. All
functions return views that kernels can read in place, or raise with the argument's name, its
value and the rule.

Letters: T tokens of this call, K ``top_k``, H ``hidden``, S ``num_scales``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from moecomm import arrays, dtypes
from moecomm.arrays import ArrayView, Device, Kind, device_text
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError

FP8: Final = "float8_e4m3fn"
IDX_DTYPES: Final = ("int32", "int64")
CAST_DTYPES: Final = ("bfloat16", "float16", "float32")  # also what weights may be


def input_dtypes(cfg: MoeConfig) -> tuple[str, ...]:
    """Element types that ``x`` may have."""
    if cfg.coded is not None:
        return CAST_DTYPES
    wire = cfg.dispatch_dtype
    return (wire, *CAST_DTYPES) if wire == FP8 else (wire,)


@dataclass(frozen=True, slots=True)
class DispatchInputs:
    """Inputs of one dispatch, ready for kernels. Holds the memory: keep it while they run.

    Attributes:
        num_rows: T, rows of ``x``.
        kind: what the caller gets back, taken from ``x``.
        x: ``[T, H]``, any row stride.
        x_code: device code's number for ``x``'s element type, which differs from
            ``dispatch_dtype`` where dispatch casts to fp8.
        topk_idx: ``[T, K]`` int32 or int64, any row stride.
        topk_weights: ``[T, K]`` float32, any row stride; ``None`` if not given.
        x_scale: ``[T, S]`` float32, any two strides; ``None`` unless ``x`` is fp8 with scales.
        num_tokens: ``[1]`` int32; ``None``: all T.
    """

    num_rows: int
    kind: Kind
    x: ArrayView
    x_code: int
    topk_idx: ArrayView
    topk_weights: ArrayView | None
    x_scale: ArrayView | None
    num_tokens: ArrayView | None


def check_dispatch_inputs(
    cfg: MoeConfig,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    x_scale: Any,
    num_tokens: Any,
    device: Device,
    *,
    stream: int | None = None,
) -> DispatchInputs:
    """Check what dispatch was given; bf16 and fp16 weights become float32.

    ``stream``: where CUDA conversions run; ``None``: the caller's current stream.

    Raises:
        ConfigError: a shape, device, stride or combination breaks its rule.
        DtypeError: a dtype does, or an argument is no array.
    """
    rows = _look("x", x, device, stream)
    rows = _check_x_dtype(cfg, rows)
    _check_shape("x", rows, (None, cfg.hidden), "[tokens, hidden]")
    num_rows = rows.shape[0]
    if num_rows > cfg.max_tokens:
        raise ConfigError(
            f"x has {num_rows} tokens: must be at most max_tokens={cfg.max_tokens}; raise "
            "max_tokens on every rank, or split the batch"
        )
    idx = _look("topk_idx", topk_idx, device, stream)
    _check_dtype("topk_idx", idx, IDX_DTYPES)
    _check_shape("topk_idx", idx, (None, cfg.top_k), "[tokens, top_k]")
    if idx.shape[0] != num_rows:
        raise ConfigError(
            f"x has {num_rows} tokens and topk_idx {idx.shape[0]}: must have one row per token each"
        )
    if topk_weights is None and cfg.weights_travel:
        raise ConfigError("topk_weights=None: reduce='sender' needs the weights at dispatch")
    return DispatchInputs(
        num_rows=num_rows,
        kind=rows.kind,
        x=arrays.kernel_ready(rows, "x"),
        x_code=dtypes.code(rows.dtype),
        topk_idx=arrays.kernel_ready(idx, "topk_idx"),
        topk_weights=_check_weights(cfg, topk_weights, num_rows, device, stream),
        x_scale=_check_scale(cfg, x_scale, rows, device, stream),
        num_tokens=_check_num_tokens(num_tokens, device, stream),
    )


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
    found = _look("y", y, device, stream)
    _check_dtype("y", found, (cfg.combine_dtype,), f"combine_dtype={cfg.combine_dtype!r}")
    _check_shape("y", found, expected_shape, "recv.x's shape")
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
    return _check_weights(cfg, topk_weights, num_rows, device, stream)


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
    found = _look("out", out, device, None)
    _check_dtype("out", found, (cfg.combine_dtype,), f"combine_dtype={cfg.combine_dtype!r}")
    _check_shape("out", found, (num_rows, cfg.hidden), "[tokens, hidden]")
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


def _look(name: str, array: Any, device: Device, stream: int | None) -> ArrayView:
    found = arrays.view(array, name, stream=stream)
    if found.device != device:
        raise ConfigError(
            f"{name} is on {device_text(found.device)}: must be on {device_text(device)}, the "
            "device of this communicator"
        )
    return found


def _check_dtype(name: str, found: ArrayView, allowed: tuple[str, ...], why: str = "") -> None:
    if found.dtype not in allowed:
        reason = f" ({why})" if why else ""
        raise DtypeError(f"{name} has dtype {found.dtype}: must be {' or '.join(allowed)}{reason}")


def _check_shape(
    name: str, found: ArrayView, expected: tuple[int | None, ...], meaning: str
) -> None:
    """``None`` extents are free."""
    if found.shape == expected:
        return
    fits = len(found.shape) == len(expected) and all(
        want is None or have == want for have, want in zip(found.shape, expected, strict=True)
    )
    if not fits:
        shown = ", ".join("any" if want is None else str(want) for want in expected)
        raise ConfigError(f"{name} has shape {found.shape}: must be [{shown}], {meaning}")


def _check_x_dtype(cfg: MoeConfig, x: ArrayView) -> ArrayView:
    wanted, allowed = cfg.dispatch_dtype, input_dtypes(cfg)
    if cfg.coded is not None:
        _check_dtype("x", x, allowed, f"codec={cfg.coded.name!r} encodes it")
        return x
    if wanted == FP8 and x.kind == "cupy" and x.dtype == "uint8":
        return replace(x, dtype=FP8)  # CuPy has no fp8: its users carry the bits as bytes
    _check_dtype("x", x, allowed, f"dispatch_dtype={wanted!r}")
    return x


def _check_weights(
    cfg: MoeConfig, weights: Any, num_rows: int, device: Device, stream: int | None
) -> ArrayView | None:
    if weights is None:
        return None
    found = _look("topk_weights", weights, device, stream)
    _check_dtype("topk_weights", found, CAST_DTYPES)
    _check_shape("topk_weights", found, (num_rows, cfg.top_k), "topk_idx's shape")
    return arrays.kernel_ready(arrays.as_float32(found, stream=stream), "topk_weights")


def _check_scale(
    cfg: MoeConfig, x_scale: Any, x: ArrayView, device: Device, stream: int | None
) -> ArrayView | None:
    if x_scale is not None and cfg.coded is not None:
        raise ConfigError(
            f"x_scale given with codec={cfg.coded.name!r}: the codec makes the scales"
        )
    scaled = cfg.scale_block is not None and x.dtype == FP8
    if x_scale is None:
        if scaled:
            raise ConfigError(
                f"x_scale=None: x is {FP8} and scale_block={cfg.scale_block}, so its scales must "
                "be given"
            )
        return None
    found = _look("x_scale", x_scale, device, stream)
    if not scaled:
        raise ConfigError(
            f"x_scale given with x of dtype {x.dtype}, dispatch_dtype={cfg.dispatch_dtype!r} and "
            f"scale_block={cfg.scale_block}: only {FP8} input with scale_block set has scales"
        )
    _check_dtype("x_scale", found, ("float32",))
    _check_shape("x_scale", found, (x.shape[0], cfg.num_scales), "[tokens, scale blocks]")
    return arrays.kernel_ready(found, "x_scale", column_stride=True)


def _check_num_tokens(num_tokens: Any, device: Device, stream: int | None) -> ArrayView | None:
    if num_tokens is None:
        return None
    found = _look("num_tokens", num_tokens, device, stream)
    _check_dtype("num_tokens", found, ("int32",))
    _check_shape("num_tokens", found, (1,), "one number on the device")
    return arrays.kernel_ready(found, "num_tokens")


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
