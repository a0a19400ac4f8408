"""CUDA C++ text → LTO-IR → cubin, in memory. Needs no GPU, driver or nvcc."""

from __future__ import annotations

import importlib
import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moecomm.errors import CompileError
from moecomm.kernels.jit import elf, fatbin
from moecomm.kernels.jit.resources import Resources, parse_report

logger = logging.getLogger(__name__)

STANDARD: Final = "c++17"
# Both steps: whatever is added here belongs into cache keys, see `options_identity`.
_COMPILE: Final[dict[str, Any]] = {
    "std": STANDARD,
    "relocatable_device_code": True,
    "link_time_optimization": True,
}
_LINK: Final[dict[str, Any]] = {
    "link_time_optimization": True,
    "ptxas_options": "-v",
    "verbose": True,
}
_IMPORT_LOCK: Final = threading.Lock()
_KINDS: Final = {".a": "library", ".ltoir": "ltoir", ".cubin": "cubin", ".o": "object"}


@dataclass(frozen=True, slots=True)
class LinkInput:
    """Something linked to a kernel: a device archive (.a), object (.o), .cubin or .ltoir.

    ``data`` is the content where there is no file; ``name`` then only names it. ``exact``: products
    and sums that it holds as LTO-IR must not be fused.
    """

    name: str
    data: bytes | None = None
    exact: bool = False

    @property
    def kind(self) -> str:
        suffix = Path(self.name).suffix
        if suffix not in _KINDS:
            raise CompileError(f"link input {self.name}: must end in one of {', '.join(_KINDS)}")
        return _KINDS[suffix]

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        try:
            return Path(self.name).read_bytes()
        except OSError as error:
            raise CompileError(f"link input {self.name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one source, with kernel name → resources, as far as the linker told them."""

    code: bytes
    resources: dict[str, Resources]


def options_identity(arch: str) -> str:
    """Text for cache keys: every option that ``build`` passes on."""
    return repr((arch, sorted(_COMPILE.items()), sorted(_LINK.items())))


def build(name: str, text: str, arch: str, link: Sequence[LinkInput] = ()) -> Cubin:
    """Compile ``text`` for ``arch`` and link it with ``link``.

    ``name`` stands in messages. ``arch`` must have passed ``Toolchain.check_arch``.

    Raises:
        CompileError: with the compiler's or the linker's log.
    """
    log, code = _link(name, to_ltoir(name, text, arch), arch, link)
    sections = elf.section_sizes(code)
    resources = parse_report(log, sections)
    return Cubin(code, resources)


def to_ltoir(name: str, text: str, arch: str) -> bytes:
    """Compile ``text`` to LTO-IR, NVVM code that is optimised when it is linked.

    Raises:
        CompileError: with the compiler's log.
    """
    core = _cuda_core()
    log = io.StringIO()
    try:
        options = core.ProgramOptions(name=name, arch=arch, **_COMPILE)
        ltoir = core.Program(text, "c++", options).compile("ltoir", logs=log).code
    except Exception as error:
        raise _failure(f"{name} does not compile for {arch}", error) from error
    if log.getvalue():
        logger.debug("%s for %s: %s", name, arch, log.getvalue())
    return bytes(ltoir)


def _link(name: str, ltoir: bytes, arch: str, link: Sequence[LinkInput]) -> tuple[str, bytes]:
    """Return the linker's log and the cubin."""
    if any(item.exact for item in link):
        return _link_exactly(name, ltoir, arch, link)
    core = _cuda_core()
    make = core.ObjectCode
    makers = {
        "library": make.from_library,
        "ltoir": make.from_ltoir,
        "cubin": make.from_cubin,
        "object": make.from_object,
    }
    inputs = [makers[item.kind](item.read(), name=item.name) for item in link]
    inputs.insert(0, make.from_ltoir(ltoir, name=name))
    try:
        options = core.LinkerOptions(name=name, arch=arch, **_LINK)
        linker = core.Linker(*inputs, options=options)
        code = bytes(linker.link("cubin").code)
        return linker.get_info_log(), code
    except Exception as error:
        raise _link_failure(name, arch, link, error) from error


def _link_exactly(
    name: str, ltoir: bytes, arch: str, link: Sequence[LinkInput]
) -> tuple[str, bytes]:
    """``_link`` with ``-fma=0``, which ``LinkerOptions`` of cuda.core 1.2 spells wrong."""
    from cuda.bindings import nvjitlink

    kinds = {
        "library": nvjitlink.InputType.LIBRARY,
        "ltoir": nvjitlink.InputType.LTOIR,
        "cubin": nvjitlink.InputType.CUBIN,
        "object": nvjitlink.InputType.OBJECT,
    }
    options = [f"-arch={arch}", "-lto", "-fma=0", "-verbose", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        pieces = [("ltoir", ltoir, name), *((item.kind, item.read(), item.name) for item in link)]
        for kind, data, title in pieces:
            nvjitlink.add_data(handle, kinds[kind], data, len(data), title)
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return log.decode(errors="replace").rstrip("\0"), bytes(code)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        error.add_note(log.decode(errors="replace"))
        raise _link_failure(name, arch, link, error) from error
    finally:
        nvjitlink.destroy(handle)


def _link_failure(
    name: str, arch: str, link: Sequence[LinkInput], error: Exception
) -> CompileError:
    held = [f"{item.name} holds code for {_archs(item)}" for item in link]
    return _failure("; ".join([f"{name} does not link for {arch}", *held]), error)


def _cuda_core() -> Any:
    """``cuda.core``, one thread at a time: two that import it at once see half of it (1.2)."""
    with _IMPORT_LOCK:
        return importlib.import_module("cuda.core")


def _archs(item: LinkInput) -> str:
    if item.kind == "ltoir":
        return "any architecture"
    return ", ".join(fatbin.archs(item.read())) or "no architecture that can be recognised"


def _failure(what: str, error: Exception) -> CompileError:
    log = "\n".join([str(error), *getattr(error, "__notes__", [])]).replace("\0", "").strip()
    return CompileError(f"{what}:\n{log}", log)
