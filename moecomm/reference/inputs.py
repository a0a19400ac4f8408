"""What the reference accepts, and what of it travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from moecomm.codecs.plain import encode_rows
from moecomm.config import MoeConfig
from moecomm.dtypes import name_of
from moecomm.errors import ConfigError, DtypeError
from moecomm.reference.fp8 import quantize
from moecomm.reference.routing import Routing

Array = NDArray[Any]

FP8: Final = "float8_e4m3fn"
FLOATS: Final = ("bfloat16", "float16", "float32")


def route(
    cfg: MoeConfig,
    num_ranks: int,
    topk_idxs: Sequence[Array],
    topk_weights: Sequence[Array] | None,
) -> Routing:
    """Follow every token; checks shapes and dtypes of the routing."""
    idxs = _per_group("topk_idx", cfg, num_ranks, topk_idxs)
    weights = None
    if topk_weights is not None:
        weights = _per_group("topk_weights", cfg, num_ranks, topk_weights)
    for group, idx in enumerate(idxs):
        _check_dtype("topk_idx", idx, ("int32", "int64"))
        if len(idx) > cfg.max_tokens:
            raise ConfigError(
                f"{len(idx)} tokens in source group {group}: must be at most "
                f"max_tokens={cfg.max_tokens}"
            )
        check_shape("topk_idx", group, idx, (len(idx), cfg.top_k))
        if weights is not None:
            _check_dtype("topk_weights", weights[group], FLOATS)
            check_shape("topk_weights", group, weights[group], idx.shape)
    return Routing(cfg, num_ranks, idxs, weights)


def wire(
    cfg: MoeConfig, num_ranks: int, xs: Sequence[Array], x_scales: Sequence[Array] | None
) -> tuple[list[Array], list[Array] | None]:
    """Rows and scales as they travel, one a source group: as given, cast to fp8, or encoded."""
    rows = _per_group("x", cfg, num_ranks, xs)
    if cfg.coded is not None:
        if x_scales is not None:
            raise ConfigError(f"x_scale given with codec={cfg.coded.name!r}: it makes the scales")
        for x in rows:
            _check_dtype("x", x, FLOATS)
        return _split([encode_rows(cfg.coded, x) for x in rows])
    as_is = all(name_of(x.dtype) == cfg.dispatch_dtype for x in rows)
    if (x_scales is not None) != (as_is and cfg.scale_block is not None):
        raise ConfigError("x_scale: must be given for fp8 x with scale_block, and only then")
    if as_is:
        if x_scales is None:
            return rows, None
        scales = _per_group("x_scale", cfg, num_ranks, x_scales)
        for scale in scales:
            _check_dtype("x_scale", scale, ("float32",))
        return rows, scales
    for x in rows:
        _check_dtype("x", x, FLOATS if cfg.dispatch_dtype == FP8 else (cfg.dispatch_dtype,))
    return _split([quantize(x, cfg.scale_block, cfg.scale_pow2) for x in rows])


def _split(cast: Sequence[tuple[Array, Array | None]]) -> tuple[list[Array], list[Array] | None]:
    found = [scale for _, scale in cast if scale is not None]
    return [q for q, _ in cast], found or None


def _per_group(name: str, cfg: MoeConfig, num_ranks: int, arrays: Sequence[Array]) -> list[Array]:
    """One of every ``replicas`` equal arrays."""
    if len(arrays) != num_ranks:
        raise ConfigError(f"{name}: {len(arrays)} arrays for {num_ranks} ranks")
    for rank in range(num_ranks):
        first = arrays[rank - rank % cfg.replicas]
        same = first.shape == arrays[rank].shape and first.tobytes() == arrays[rank].tobytes()
        if not same:
            raise ConfigError(f"{name} of rank {rank}: replicas={cfg.replicas} must hold the same")
    return list(arrays[:: cfg.replicas])


def check_shape(name: str, where: int, array: Array, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ConfigError(f"{name} number {where} has shape {array.shape}: must be {expected}")


def _check_dtype(name: str, array: Array, allowed: tuple[str, ...]) -> None:
    if name_of(array.dtype) not in allowed:
        raise DtypeError(f"{name} has dtype {array.dtype}: must be {' or '.join(allowed)}")
