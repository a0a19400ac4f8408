"""NVRTC, nvJitLink and cuda.core: found, versions compared, explained when they do not fit."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from moecomm.errors import CompileError, ConfigError

INSTALL: Final = 'pip install "moecomm[cuda13]"'
DEFAULT_ARCHS: Final = ("sm_80", "sm_90", "sm_100")
_ARCH: Final = re.compile(r"sm_(\d+)([af]?)")
_FIRST_SPECIFIC: Final = {"a": 90, "f": 100}  # first architectures that have sm_90a, sm_100f


class Version(NamedTuple):
    """The CUDA release that a library belongs to."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class Library:
    """One shared library of the toolchain. ``release``: full version of its wheel, if one."""

    name: str
    version: Version
    path: str = ""
    release: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.release or self.version}"

    def identity(self) -> str:
        """Text that differs between builds of the library, and not between machines."""
        file = Path(self.path)
        size = file.stat().st_size if self.path else 0
        return f"{self.name} {self.version} {self.release} {file.resolve().name} {size}"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Everything that turns CUDA C++ text into a cubin.

    ``archs`` are the numbers of the architectures that NVRTC knows, ascending. ``nvvm`` compiles
    numba functions, and is ``None`` when its wheel is not installed.
    """

    nvrtc: Library
    nvjitlink: Library
    nvvm: Library | None
    cuda_core: str
    cuda_bindings: str
    archs: tuple[int, ...]

    @staticmethod
    @functools.cache
    def load() -> Toolchain:
        """Find the libraries and check that they work together.

        Raises:
            CompileError: something is missing, or nvJitLink is older than what it must link.
        """
        toolchain = _find()
        check_versions(toolchain.nvjitlink, toolchain.nvrtc, toolchain.nvvm)
        return toolchain

    def identity(self) -> str:
        """Text for cache keys: changes with any part that can change the code."""
        parts = [self.nvrtc.identity(), self.nvjitlink.identity(), f"cuda.core {self.cuda_core}"]
        return "\n".join(parts)

    def arch_names(self) -> list[str]:
        """Return every name that ``check_arch`` accepts."""
        return [
            f"sm_{number}{letter}"
            for number in self.archs
            for letter in ("", "a", "f")
            if number >= _FIRST_SPECIFIC.get(letter, 0)
        ]

    def check_arch(self, arch: str) -> str:
        """Return ``arch`` if NVRTC compiles for it.

        Raises:
            ConfigError: it does not; the message lists those that it does.
        """
        if isinstance(arch, str) and _ARCH.fullmatch(arch) and arch in self.arch_names():
            return arch
        raise ConfigError(
            f"arch={arch!r}: {self.nvrtc} compiles for {', '.join(self.arch_names())}"
        )


def check_versions(nvjitlink: Library, *inputs: Library | None) -> None:
    """Check that ``nvjitlink`` is not older than the libraries whose output it links.

    Raises:
        CompileError: it is, and every link would end with ``ERROR_OUTDATED_LIBRARY``. The message
            holds the command that brings all of them to one release.
    """
    newer = [library for library in inputs if library and library.version > nvjitlink.version]
    if not newer:
        return
    release = f"{nvjitlink.version}.*"
    raise CompileError(
        f"{' and '.join(map(str, newer))} produces code that {nvjitlink} ({nvjitlink.path}) is too "
        f"old to link: nvJitLink must be at least as new as NVRTC and NVVM. Run "
        f'pip install "nvidia-cuda-nvrtc=={release}" "nvidia-nvjitlink=={release}" '
        f'"nvidia-nvvm=={release}"'
    )


def _find() -> Toolchain:
    try:
        from cuda.bindings import nvjitlink, nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        core, bindings = metadata.version("cuda-core"), metadata.version("cuda-bindings")
    except ImportError as error:  # PackageNotFoundError is one, too
        raise _missing(f"Python package {error.name} is not installed") from error
    try:
        nvrtc_path = load_nvidia_dynamic_lib("nvrtc").abs_path
        nvjitlink_path = load_nvidia_dynamic_lib("nvJitLink").abs_path
    except DynamicLibNotFoundError as error:
        raise _missing(str(error).splitlines()[0]) from error
    return Toolchain(
        nvrtc=_library("NVRTC", nvrtc_path, _value(nvrtc.nvrtcVersion()), "nvidia-cuda-nvrtc"),
        nvjitlink=_library("nvJitLink", nvjitlink_path, nvjitlink.version(), "nvidia-nvjitlink"),
        nvvm=_nvvm(),
        cuda_core=core,
        cuda_bindings=bindings,
        archs=tuple(sorted(_value(nvrtc.nvrtcGetSupportedArchs())[0])),
    )


def _missing(what: str) -> CompileError:
    return CompileError(f"CUDA kernels cannot be compiled here: {what}. Run {INSTALL}")


def _value(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a cuda.bindings call, whose first item is its status."""
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"NVRTC does not answer: {status!s}")
    return tuple(values)


def _library(name: str, path: str, version: tuple[int, int], wheel: str) -> Library:
    inside_wheel = "site-packages" in path
    return Library(name, Version(*version), path, _release(wheel) if inside_wheel else None)


def _nvvm() -> Library | None:
    """NVVM by its wheel alone: opening the library costs 140 MB for an answer rarely needed."""
    release = _release("nvidia-nvvm")
    if release is None:
        return None
    major, minor = release.split(".")[:2]
    return Library("NVVM", Version(int(major), int(minor)), release=release)


def _release(wheel: str) -> str | None:
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return None
