"""Sources to cubins on disk: compiled once, then found by everything that went into them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moecomm import __version__
from moecomm.cache import Cache, default_cache, key_of
from moecomm.errors import CompileError
from moecomm.kernels import source
from moecomm.kernels.jit import compiler, elf
from moecomm.kernels.jit.compiler import Cubin, LinkInput
from moecomm.kernels.jit.resources import Resources
from moecomm.kernels.jit.toolchain import Toolchain

FORMAT: Final = "1"  # of the report beside the cubin


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin on disk.

    ``kernels`` are the names to launch, sorted; ``resources`` has one entry for each that the
    linker reported. ``seconds`` is what this call took; ``cached`` says that nothing was compiled.
    """

    name: str
    arch: str
    path: Path
    kernels: tuple[str, ...]
    resources: dict[str, Resources]
    nbytes: int
    seconds: float
    cached: bool

    def require_report(self) -> None:
        """Raise ``CompileError`` if a kernel's resources are not known.

        Not a part of compiling: on a machine with a GPU (cuda.core 1.2.0, driver 580, 2026-11-30)
        the linker's report was missing now and then, and the kernels ran all the same.
        """
        missing = ", ".join(sorted(set(self.kernels) - set(self.resources)))
        if missing:
            raise CompileError(
                f"{self.name} for {self.arch}: the linker reports nothing about {missing}"
            )


def compile_kernel(
    source_name: str,
    defines: Mapping[str, int | str],
    arch: str,
    *,
    link: Sequence[LinkInput] = (),
    cache: Cache | None = None,
) -> Compiled:
    """Return the cubin of a source of this package with ``defines``, for ``arch`` ("sm_90").

    Raises:
        ConfigError: the source, a define or the architecture is not known.
        CompileError: it does not compile or link, the toolchain is missing or does not fit, or
            ``MOECOMM_NO_COMPILE`` is set and there is no cubin.
    """
    text = source.bundle(source_name, defines)
    return compile_source(source_name, text, arch, link=link, cache=cache)


def compile_source(
    name: str,
    text: str,
    arch: str,
    *,
    link: Sequence[LinkInput] = (),
    cache: Cache | None = None,
) -> Compiled:
    """Return the cubin of self-contained CUDA C++ ``text``; ``name`` stands in messages.

    Raises: as ``compile_kernel``.
    """
    started = time.perf_counter()
    toolchain = Toolchain.load()
    toolchain.check_arch(arch)
    cache = default_cache() if cache is None else cache
    key = cubin_key(name, text, arch, link, toolchain)
    builder = _Builder(name, text, arch, link, cache, key)
    path = cache.get(key, ".cubin", builder.write_cubin, what=f"{name} for {arch}")
    report = cache.get(key, ".json", builder.write_report, what=f"report of {name} for {arch}")
    code = path.read_bytes()
    return Compiled(
        name=name,
        arch=arch,
        path=path,
        kernels=tuple(sorted(elf.kernel_names(elf.section_sizes(code)))),
        resources=_resources(report),
        nbytes=len(code),
        seconds=time.perf_counter() - started,
        cached=builder.built is None,
    )


def cubin_key(
    name: str, text: str, arch: str, link: Sequence[LinkInput], toolchain: Toolchain
) -> str:
    """Hash everything that the machine code depends on; headers are part of ``text``."""
    parts: list[bytes | str] = [
        f"cubin {FORMAT} moecomm {__version__}",
        name,
        text,
        compiler.options_identity(arch),
        toolchain.identity(),
    ]
    for item in link:
        parts += [f"{item.kind}{' exact' * item.exact}", item.read()]
    return key_of(*parts)


class _Builder:
    """Compiles at most once, for the cubin and for the report about it."""

    def __init__(
        self,
        name: str,
        text: str,
        arch: str,
        link: Sequence[LinkInput],
        cache: Cache,
        key: str,
    ) -> None:
        self.name, self.text, self.arch, self.link = name, text, arch, link
        self.cache, self.key = cache, key
        self.built: Cubin | None = None

    def write_cubin(self, path: Path) -> None:
        # The report first: whoever waits for the cubin then finds both and compiles nothing.
        code = self._build().code
        self.cache.get(self.key, ".json", self.write_report)
        path.write_bytes(code)

    def write_report(self, path: Path) -> None:
        resources = self._build().resources
        report = {kernel: dataclasses.asdict(r) for kernel, r in resources.items()}
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")

    def _build(self) -> Cubin:
        if self.built is None:
            try:
                self.built = compiler.build(self.name, self.text, self.arch, self.link)
            except CompileError as error:
                kept = self.cache.keep(self.key, "failed.cu", self.text)
                raise CompileError(str(error), error.log, str(kept) if kept else None) from error
        return self.built


def _resources(report: Path) -> dict[str, Resources]:
    entries = json.loads(report.read_text(encoding="utf-8"))
    return {kernel: Resources(**fields) for kernel, fields in entries.items()}
