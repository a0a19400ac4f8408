"""Memory and C functions by address, for numba functions that hold no Python object.

Everything is an ``int64``: addresses, counters, keys (as bit patterns), so that numba never mixes
signed and unsigned. Addresses are arguments at run time and nothing is baked into the machine code,
which can therefore be cached on disk.
"""

from __future__ import annotations

import platform
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64: Final = ir.IntType(64)
_C_TYPES: Final = {"i32": ir.IntType(32), "u32": ir.IntType(32), "i64": _I64, "void": ir.VoidType()}


def c_function(result: str, *arguments: str) -> Any:
    """A numba function ``f(address, *arguments) -> int64`` that calls the C function there.

    ``result`` and ``arguments`` are ``"i32"``, ``"u32"`` or ``"i64"`` (also for pointers and
    sizes); ``result`` may be ``"void"``, and the call is then 0.
    """
    signature = types.int64(types.int64, *[types.int64] * len(arguments))

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_C_TYPES[result], [_C_TYPES[a] for a in arguments])
        function = builder.inttoptr(args[0], kind.as_pointer())
        values = [
            value if name == "i64" else builder.trunc(value, _C_TYPES[name])
            for name, value in zip(arguments, args[1:], strict=True)
        ]
        returned = builder.call(function, values)
        if result == "void":
            return _I64(0)
        if result == "i64":
            return returned
        return (builder.sext if result == "i32" else builder.zext)(returned, _I64)

    return intrinsic(_TYPERS[len(arguments)](signature, generate))


# An intrinsic's typing function must have a fixed number of arguments.
_TYPERS: Final[tuple[Any, ...]] = (
    lambda s, g: lambda typing, f: (s, g),
    lambda s, g: lambda typing, f, a: (s, g),
    lambda s, g: lambda typing, f, a, b: (s, g),
    lambda s, g: lambda typing, f, a, b, c: (s, g),
    lambda s, g: lambda typing, f, a, b, c, d: (s, g),
    lambda s, g: lambda typing, f, a, b, c, d, e: (s, g),
)


def _load(bits: int, ordering: str | None) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
        if ordering is None:
            value = builder.load(pointer)
        else:
            value = builder.load_atomic(pointer, ordering, bits // 8)
        return value if bits == 64 else builder.zext(value, _I64)

    return intrinsic(_TYPERS[0](types.int64(types.int64), generate))


def _store(bits: int, ordering: str | None) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
        value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
        if ordering is None:
            builder.store(value, pointer)
        else:
            builder.store_atomic(value, pointer, ordering, bits // 8)
        return context.get_dummy_value()

    return intrinsic(_TYPERS[1](types.void(types.int64, types.int64), generate))


# Loads of 8 to 32 bits are zero-extended. A plain load in a loop without calls may be hoisted out
# of it: what another thread writes is read with ``ld32_acquire`` or ``ld64_acquire``.
ld8: Final = _load(8, None)
ld16: Final = _load(16, None)
ld32: Final = _load(32, None)
ld64: Final = _load(64, None)
ld32_acquire: Final = _load(32, "acquire")
ld64_acquire: Final = _load(64, "acquire")
st8: Final = _store(8, None)
st16: Final = _store(16, None)
st32: Final = _store(32, None)
st64: Final = _store(64, None)
st32_release: Final = _store(32, "release")
st64_release: Final = _store(64, "release")


def _unlikely(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    bit = ir.IntType(1)
    expect = builder.module.declare_intrinsic(
        "llvm.expect", [bit], ir.FunctionType(bit, [bit, bit])
    )
    return builder.call(expect, [args[0], bit(0)])


# A condition that hardly ever holds: what follows is kept out of the way of all else.
unlikely: Final = intrinsic(_TYPERS[0](types.boolean(types.boolean), _unlikely))


def _fence(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    builder.fence("seq_cst")
    return context.get_dummy_value()


def _pause(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Inline assembly ends the process ("Inline asm not supported by this streamer"), so this is
    the target's own LLVM intrinsic."""
    void = ir.VoidType()
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(void, [])
        name: str = "llvm.x86.sse2.pause"
        values = []
    elif platform.machine() == "aarch64":
        kind = ir.FunctionType(void, [ir.IntType(32)])
        name, values = "llvm.aarch64.hint", [ir.IntType(32)(1)]
    else:
        return context.get_dummy_value()
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
    return context.get_dummy_value()


def _cycles(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    function = builder.module.declare_intrinsic(
        "llvm.readcyclecounter", fnty=ir.FunctionType(_I64, [])
    )
    return builder.call(function, [])


def _nullary(result: Any, generate: Any) -> Any:
    return intrinsic(lambda typing: (result(), generate))


fence: Final = _nullary(types.void, _fence)  # full: also between write-combining and plain stores
cpu_pause: Final = _nullary(types.void, _pause)
cycles: Final = _nullary(types.int64, _cycles)
