"""What kernels of a codec are compiled with: its functions, and what device code asks about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moecomm import dtypes
from moecomm.cache import default_cache, key_of
from moecomm.codecs.compiled import argument_types, machine_code, return_type
from moecomm.codecs.definition import FUNCTIONS, Codec
from moecomm.config import MoeConfig
from moecomm.kernels.geometry import codec_shared_offset
from moecomm.kernels.jit import LinkInput, numba_cuda
from moecomm.layout import Layout

OLDEST: Final = "sm_80"
INPUT: Final = "CODEC_INPUT"  # the emulator's last number: the element type of this launch's input
# Stage → functions that it calls.
CALLS: Final = {"dispatch_send": ("scale", "inverse", "encode"), "dispatch_recv": ("decode",)}


def calls(cfg: MoeConfig, stage: str) -> tuple[str, ...]:
    """Functions of ``cfg``'s codec that ``stage`` calls; none: it knows nothing of a codec."""
    codec = cfg.coded
    if codec is None or (stage == "dispatch_recv" and cfg.decode_to is None):
        return ()
    return tuple(name for name in CALLS.get(stage, ()) if getattr(codec, name) is not None)


def wire_code(cfg: MoeConfig) -> int:
    """Device code's number for what travels; of a codec's elements it knows only the size."""
    if cfg.coded is None:
        return dtypes.code(cfg.dispatch_dtype)
    return _code(cfg.coded)


def recv_code(cfg: MoeConfig) -> int:
    """Device code's number for what ``recv.x`` has."""
    return wire_code(cfg) if cfg.decode_to is None else dtypes.code(cfg.decode_to)


def switches(cfg: MoeConfig, stage: str) -> dict[str, int]:
    """Preprocessor switches of ``stage``; none where it calls no codec."""
    codec = cfg.coded
    if codec is None or not calls(cfg, stage):
        return {}
    return {"CODEC" if stage == "dispatch_send" else "DECODES": 1}


def constants(layout: Layout) -> dict[str, int]:
    """Numbers beside those of ``Layout.constants``; none without a codec."""
    codec = layout.cfg.coded
    if codec is None:
        return {}
    return {**_traits(codec), "CODEC_SHARED_OFF": codec_shared_offset(layout)}


def check_defines(codec: Codec) -> dict[str, int | str]:
    """What ``codec_check.cu`` is compiled with."""
    shape = {"WIRE_DTYPE": _code(codec), "HIDDEN": 1}  # rows are not looked at
    return {**_traits(codec), **shape}


def address_names() -> list[str]:
    """Numbers that the emulator gets beside those: where the functions are."""
    return [f"CODEC_AT_{name}" for name in FUNCTIONS]


def addresses(codec: Codec | None) -> list[int]:
    """The functions' addresses in this process, in the order of ``address_names``.

    Raises: as ``machine_code``.
    """
    if codec is None:
        return []
    found = machine_code(codec).addresses
    return [found.get(name, 0) for name in FUNCTIONS]


def link_inputs(cfg: MoeConfig, stage: str, arch: str) -> tuple[LinkInput, ...]:
    """The codec's functions that ``stage`` calls, as LTO-IR, from the kernel cache or made now.

    Raises:
        CodecError: a function cannot be compiled, returns the wrong type, or differs from Python.
        CompileError: numba or numba-cuda is missing, or cannot make code for a GPU of it.
    """
    return () if cfg.coded is None else link_functions(cfg.coded, calls(cfg, stage), arch)


def link_functions(codec: Codec, names: Sequence[str], arch: str) -> tuple[LinkInput, ...]:
    """``link_inputs`` of functions by name."""
    return tuple(_link_input(codec, name, arch) for name in names)


def _code(codec: Codec) -> int:
    return {1: dtypes.BITS8, 2: dtypes.BITS16}[codec.itemsize]


def _traits(codec: Codec) -> dict[str, int]:
    return {
        "CODEC_SCALED": int(codec.scaled),
        "CODEC_INVERSE": int(codec.inverse is not None),
        "CODEC_SIGNED": int(codec.signed),
    }


def _link_input(codec: Codec, name: str, arch: str) -> LinkInput:
    base = min(arch, OLDEST, key=numba_cuda.capability)  # serves all that are newer
    what = f"moe_codec_{name}"
    key = key_of("codec function", codec.identity, what, base, numba_cuda.identity())

    def write(path: Path) -> None:
        machine_code(codec)  # its types, and the comparison with Python
        made = numba_cuda.device_function(
            codec.frozen[name],
            lambda types: return_type(types, name)(*argument_types(types, codec, name)),
            what,
            base,
        )
        path.write_bytes(made)

    found = default_cache().get(key, ".ltoir", write, what=f"{what} of codec {codec.name}")
    return LinkInput(f"{what}.ltoir", found.read_bytes(), exact=True)
