"""What a cubin (an ELF file) says about itself, read without CUDA tools."""

from __future__ import annotations

import struct
from typing import Final

from moecomm.errors import CompileError

_HEADER: Final = struct.Struct("<16s HHI QQQ I HHHHHH")
_SECTION: Final = struct.Struct("<II QQQQ II QQ")


def section_sizes(cubin: bytes) -> dict[str, int]:
    """Return section name → size in bytes.

    Raises:
        CompileError: ``cubin`` is not a whole 64-bit little-endian ELF file.
    """
    try:
        return _section_sizes(cubin)
    except (struct.error, ValueError) as error:
        raise CompileError(f"not a whole ELF file ({len(cubin)} bytes): {error}") from error


def kernel_names(sections: dict[str, int]) -> tuple[str, ...]:
    """Return the names of the kernels in a cubin, sorted.

    Kernels have a constant bank for their parameters; device functions have only code.
    """
    prefix = ".nv.constant0."
    return tuple(sorted(name.removeprefix(prefix) for name in sections if name.startswith(prefix)))


def _section_sizes(cubin: bytes) -> dict[str, int]:
    identification, *_, names_index = _HEADER.unpack_from(cubin)
    if identification[:6] != b"\x7fELF\x02\x01":
        raise ValueError("wrong magic number")
    fields = _HEADER.unpack_from(cubin)
    table, entry_size, count = fields[6], fields[11], fields[12]
    headers = [_SECTION.unpack_from(cubin, table + i * entry_size) for i in range(count)]
    strings, strings_size = headers[names_index][4], headers[names_index][5]
    text = cubin[strings : strings + strings_size]
    if len(text) != strings_size:
        raise ValueError("cut short")
    return {_name(text, header[0]): header[5] for header in headers}


def _name(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()
