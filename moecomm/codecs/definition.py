"""``Codec``: the scalar functions of one encoding, checked; and the decorator that makes one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moecomm.codecs import rules
from moecomm.dtypes import itemsize
from moecomm.errors import CodecError, ConfigError

Function = Callable[..., Any]

# One or two bytes an element; the functions see the elements' bits as integers.
WIRE_DTYPES: Final = (
    "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "bfloat16", "float16",
)  # fmt: skip
BLOCKS: Final = (16, 32, 64, 128, 256, 512)
WARP_CHUNKS: Final = 32  # a warp agrees on a block's scale: 16 bytes on the wire from each lane
FUNCTIONS: Final = ("scale", "inverse", "encode", "decode")
COPY: Final = "copy"  # the name of no codec: rows travel in dispatch_dtype

_registered: dict[str, Codec] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """One encoding of rows, made by ``codec``; equal when everything in it is.

    Attributes:
        name: for messages, and for ``MoeConfig(codec=name)``.
        wire_dtype: element type that travels, and that ``recv.x`` has unless it is decoded.
        block: columns that share a scale; ``None``: the whole token does.
        encode, decode, scale, inverse: the functions as written.
        home: "module:path" where it can be imported; empty: nowhere.
        frozen: name → function as it is compiled: constants are float32, and as they were when the
            codec was made.
        identity: hash of all that decides what arrives; equal on all ranks.
    """

    name: str
    wire_dtype: str
    block: int | None
    encode: Function
    decode: Function
    scale: Function | None = None
    inverse: Function | None = None
    home: str = ""
    frozen: Mapping[str, Function] = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        where = f"codec {self.name}"
        if self.wire_dtype not in WIRE_DTYPES:
            choices = ", ".join(map(repr, WIRE_DTYPES))
            raise CodecError(f"{where}: wire_dtype={self.wire_dtype!r}: must be one of {choices}")
        if self.inverse is not None and self.scale is None:
            raise CodecError(f"{where}: has inverse and no scale: inverse stands in for scale")
        _check_block(where, self)
        arguments = self.arguments()
        for which, function in self.functions().items():
            rules.check(f"{where}: {which}", function, arguments[which])
        frozen = {which: rules.weakened(f) for which, f in self.functions().items()}
        object.__setattr__(self, "frozen", frozen)
        given = (self.wire_dtype, str(self.block), *rules.fingerprints(frozen))
        object.__setattr__(self, "identity", rules.digest(given))

    def functions(self) -> dict[str, Function]:
        """Name → function, of those that there are."""
        found = {which: getattr(self, which) for which in FUNCTIONS}
        return {which: function for which, function in found.items() if function is not None}

    def arguments(self) -> dict[str, tuple[str, ...]]:
        """Function → what it gets; each is a float32 but ``bits``, an integer."""
        second = ("inverse",) if self.inverse else ("scale",)
        if not self.scaled:
            return {"encode": ("value",), "decode": ("bits",)}
        return {
            "scale": ("amax",),
            "inverse": ("amax",),
            "encode": ("value", *second),
            "decode": ("bits", "scale"),
        }

    @property
    def scaled(self) -> bool:
        """Whether scales travel."""
        return self.scale is not None

    @property
    def signed(self) -> bool:
        """Whether ``decode`` gets negative numbers for bits above the middle."""
        return self.wire_dtype in ("int8", "int16")

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the wire."""
        return itemsize(self.wire_dtype)

    def num_scales(self, hidden: int) -> int:
        """Scales of a row of ``hidden`` columns; the last block may be partial."""
        if not self.scaled:
            return 0
        return 1 if self.block is None else -(-hidden // self.block)

    def check(self) -> None:
        """Compile for this CPU and compare with plain Python, as every ``MoeComm`` does.

        Raises:
            CodecError: a function cannot be compiled, returns the wrong type, or differs.
            CompileError: numba is not installed.
        """
        from moecomm.codecs.compiled import machine_code

        machine_code(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __reduce__(self) -> tuple[Any, ...]:
        """By name where that leads back here; else by its functions, which need names then."""
        module, _, path = self.home.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is self:
            return _named, (module, path)
        functions = (self.encode, self.decode, self.scale, self.inverse)
        return Codec, (self.name, self.wire_dtype, self.block, *functions, self.home)

    def __repr__(self) -> str:
        return f"<Codec {self}>"

    def __str__(self) -> str:
        """What messages show: equal for equal codecs only."""
        scales = "no scales" if not self.scaled else "a scale per token"
        if self.block is not None:
            scales = f"a scale per {self.block} columns"
        return f"{self.name}: {self.wire_dtype}, {scales}, {self.identity[:12]}"


def codec(*, wire_dtype: str, block: int | None = None) -> Callable[[type], Codec]:
    """Class decorator: its functions become a codec of the class's name, which replaces it.

    ``encode(value, scale)`` returns an element's bits as an integer, ``decode(bits, scale)`` the
    value again. ``scale(amax)``, if there, makes scales: of the largest magnitude of ``block``
    columns, or of the whole token. ``inverse(amax)``, if there, makes what ``encode`` gets in place
    of the scale, so that it can multiply and not divide. Without ``scale`` no scales travel and
    both take one argument.

    The functions are written without ``self``, or as static methods. Numbers are float32.

    Args:
        wire_dtype: ``int8``, ``uint8``, ``float8_e4m3fn``, ``float8_e5m2``, ``int16``, ``uint16``,
            ``bfloat16`` or ``float16``.
        block: 16, 32, 64, 128, 256 or 512 (at most 256 where an element has two bytes); ``None``:
            one scale per token.

    Raises:
        CodecError: a function is missing, or breaks a rule that can be seen without compiling it.
    """

    def make(cls: type) -> Codec:
        if not isinstance(cls, type):
            raise CodecError(f"codec: decorates a class, not {cls!r}")
        members = {
            which: member.__func__ if isinstance(member, staticmethod) else member
            for which, member in vars(cls).items()
            if not which.startswith("__")
        }
        _check_names(cls.__name__, members)
        home = f"{cls.__module__}:{cls.__qualname__}"
        made = Codec(cls.__name__, wire_dtype, block, home=home, **members)
        _registered[made.name] = made
        return made

    return make


def find(name: str) -> Codec | None:
    """The codec that was decorated last under ``name``; ``None`` for ``"copy"``.

    Raises:
        ConfigError: there is none.
    """
    if name == COPY:
        return None
    if name not in _registered:
        known = ", ".join(map(repr, (COPY, *_registered)))
        raise ConfigError(f"codec={name!r}: must be a codec, or the name of one: {known}")
    return _registered[name]


def _named(module: str, path: str) -> Codec:
    """Unpickle a codec that has a name in its module."""
    __import__(module)
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, Codec)
    return found


def _check_names(name: str, functions: Mapping[str, Function]) -> None:
    for which in functions:
        if which not in FUNCTIONS:
            raise CodecError(
                f"codec {name}: has {which!r}: must have {', '.join(FUNCTIONS)} and nothing else; "
                "constants belong into the module"
            )
    for which in ("encode", "decode"):
        if which not in functions:
            raise CodecError(f"codec {name}: has no {which}: must have encode and decode")


def _check_block(where: str, codec: Codec) -> None:
    block, wire_dtype = codec.block, codec.wire_dtype
    if block is None:
        return
    if not codec.scaled:
        raise CodecError(f"{where}: block={block}: has no scale function, so no scales")
    most = WARP_CHUNKS * 16 // codec.itemsize
    choices = [size for size in BLOCKS if size <= most]
    if block not in choices or isinstance(block, bool):
        raise CodecError(
            f"{where}: block={block!r}: must be None (a scale per token) or one of "
            f"{', '.join(map(str, choices))} for {wire_dtype}"
        )
