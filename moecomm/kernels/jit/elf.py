"""What a cubin (an ELF file) says about itself, read without CUDA tools."""

from __future__ import annotations

import struct
from typing import Final

from moecomm.errors import CompileError

_HEADER: Final = struct.Struct("<16s HHI QQQ I HHHHHH")
_SECTION: Final = struct.Struct("<II QQQQ II QQ")
_SYMBOL: Final = struct.Struct("<I BBH QQ")
_SYMBOL_TABLE: Final = 2  # section types
_NO_BITS: Final = 8


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


def symbol_bytes(cubin: bytes, symbol: str) -> bytes | None:
    """The initial value of a global variable; ``None`` if there is no such variable, or it has
    none.

    Raises:
        CompileError: as ``section_sizes``.
    """
    try:
        return _symbol_bytes(cubin, symbol)
    except (struct.error, ValueError, IndexError) as error:
        raise CompileError(f"not a whole ELF file ({len(cubin)} bytes): {error}") from error


def _symbol_bytes(cubin: bytes, symbol: str) -> bytes | None:
    headers, _ = _sections(cubin)
    for _, kind, _, _, start, size, link, _, _, _ in headers:
        if kind != _SYMBOL_TABLE:
            continue
        names, names_size = headers[link][4], headers[link][5]
        text = cubin[names : names + names_size]
        for entry in _SYMBOL.iter_unpack(cubin[start : start + size]):
            name, _, _, section, value, nbytes = entry
            if _name(text, name) != symbol or not 0 < section < len(headers):
                continue
            if headers[section][1] == _NO_BITS:
                return None
            first = headers[section][4] + value
            return cubin[first : first + nbytes]
    return None


def _sections(cubin: bytes) -> tuple[list[tuple[int, ...]], int]:
    """Headers of all sections, and which of them holds their names."""
    identification, *_, names_index = _HEADER.unpack_from(cubin)
    if identification[:6] != b"\x7fELF\x02\x01":
        raise ValueError("wrong magic number")
    fields = _HEADER.unpack_from(cubin)
    table, entry_size, count = fields[6], fields[11], fields[12]
    return [_SECTION.unpack_from(cubin, table + i * entry_size) for i in range(count)], names_index


def _section_sizes(cubin: bytes) -> dict[str, int]:
    headers, names_index = _sections(cubin)
    strings, strings_size = headers[names_index][4], headers[names_index][5]
    text = cubin[strings : strings + strings_size]
    if len(text) != strings_size:
        raise ValueError("cut short")
    return {_name(text, header[0]): header[5] for header in headers}


def _name(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()
