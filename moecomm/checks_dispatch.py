"""What dispatch accepts; see ``checks``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from moecomm import arrays, dtypes
from moecomm.arrays import ArrayView, Device, Kind
from moecomm.checks import CAST_DTYPES, check_dtype, check_shape, check_weights, look
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError

FP8: Final = "float8_e4m3fn"
IDX_DTYPES: Final = ("int32", "int64")


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
    rows = look("x", x, device, stream)
    rows = _check_x_dtype(cfg, rows)
    check_shape("x", rows, (None, cfg.hidden), "[tokens, hidden]")
    num_rows = rows.shape[0]
    if num_rows > cfg.max_tokens:
        raise ConfigError(
            f"x has {num_rows} tokens: must be at most max_tokens={cfg.max_tokens}; raise "
            "max_tokens on every rank, or split the batch"
        )
    idx = look("topk_idx", topk_idx, device, stream)
    check_dtype("topk_idx", idx, IDX_DTYPES)
    check_shape("topk_idx", idx, (None, cfg.top_k), "[tokens, top_k]")
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
        topk_weights=check_weights(cfg, topk_weights, num_rows, device, stream),
        x_scale=_check_scale(cfg, x_scale, rows, device, stream),
        num_tokens=_check_num_tokens(num_tokens, device, stream),
    )


def _check_x_dtype(cfg: MoeConfig, x: ArrayView) -> ArrayView:
    wanted, allowed = cfg.dispatch_dtype, input_dtypes(cfg)
    if cfg.coded is not None:
        check_dtype("x", x, allowed, f"codec={cfg.coded.name!r} encodes it")
        return x
    if wanted == FP8 and x.kind == "cupy" and x.dtype == "uint8":
        return replace(x, dtype=FP8)  # CuPy has no fp8: its users carry the bits as bytes
    check_dtype("x", x, allowed, f"dispatch_dtype={wanted!r}")
    return x


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
    found = look("x_scale", x_scale, device, stream)
    if not scaled:
        raise ConfigError(
            f"x_scale given with x of dtype {x.dtype}, dispatch_dtype={cfg.dispatch_dtype!r} and "
            f"scale_block={cfg.scale_block}: only {FP8} input with scale_block set has scales"
        )
    check_dtype("x_scale", found, ("float32",))
    check_shape("x_scale", found, (x.shape[0], cfg.num_scales), "[tokens, scale blocks]")
    return arrays.kernel_ready(found, "x_scale", column_stride=True)


def _check_num_tokens(num_tokens: Any, device: Device, stream: int | None) -> ArrayView | None:
    if num_tokens is None:
        return None
    found = look("num_tokens", num_tokens, device, stream)
    check_dtype("num_tokens", found, ("int32",))
    check_shape("num_tokens", found, (1,), "one number on the device")
    return arrays.kernel_ready(found, "num_tokens")
