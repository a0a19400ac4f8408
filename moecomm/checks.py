"""What the halves accept: every rule on shape, dtype, device and stride, before any write.

Values are not looked at: expert numbers are checked on the device, where they are. All functions
return views that kernels can read in place, or raise with the argument's name, its value and the
rule. ``checks_dispatch`` and ``checks_combine`` have the arguments; here is what all share.

Letters, there too: T tokens of this call, K ``top_k``, H ``hidden``, S ``num_scales``.
"""

from __future__ import annotations

from typing import Any, Final

from moecomm import arrays
from moecomm.arrays import ArrayView, Device, device_text
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError, DtypeError

CAST_DTYPES: Final = ("bfloat16", "float16", "float32")  # what weights may be


def look(name: str, array: Any, device: Device, stream: int | None) -> ArrayView:
    """A view of an array that is on ``device``.

    Raises:
        ConfigError: it is elsewhere.
        DtypeError: it is no array.
    """
    found = arrays.view(array, name, stream=stream)
    if found.device != device:
        raise ConfigError(
            f"{name} is on {device_text(found.device)}: must be on {device_text(device)}, the "
            "device of this communicator"
        )
    return found


def check_dtype(name: str, found: ArrayView, allowed: tuple[str, ...], why: str = "") -> None:
    """Raises ``DtypeError``; ``why`` names what decides."""
    if found.dtype not in allowed:
        reason = f" ({why})" if why else ""
        raise DtypeError(f"{name} has dtype {found.dtype}: must be {' or '.join(allowed)}{reason}")


def check_shape(
    name: str, found: ArrayView, expected: tuple[int | None, ...], meaning: str
) -> None:
    """``None`` extents are free. Raises ``ConfigError``."""
    if found.shape == expected:
        return
    fits = len(found.shape) == len(expected) and all(
        want is None or have == want for have, want in zip(found.shape, expected, strict=True)
    )
    if not fits:
        shown = ", ".join("any" if want is None else str(want) for want in expected)
        raise ConfigError(f"{name} has shape {found.shape}: must be [{shown}], {meaning}")


def check_weights(
    cfg: MoeConfig, weights: Any, num_rows: int, device: Device, stream: int | None
) -> ArrayView | None:
    """``topk_weights`` as float32 ``[T, K]``, any row stride; ``None`` stays ``None``."""
    if weights is None:
        return None
    found = look("topk_weights", weights, device, stream)
    check_dtype("topk_weights", found, CAST_DTYPES)
    check_shape("topk_weights", found, (num_rows, cfg.top_k), "topk_idx's shape")
    return arrays.kernel_ready(arrays.as_float32(found, stream=stream), "topk_weights")
