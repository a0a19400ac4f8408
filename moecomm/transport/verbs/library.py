"""libibverbs: loaded once, its functions typed, its return values turned into errors."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

from moecomm.errors import TransportError, TransportUnavailable

logger = logging.getLogger(__name__)

NAME: Final = "libibverbs.so.1"
TRANSPORT: Final = "verbs"

# name → (result, arguments). ibv_reg_mr is a macro; ibv_reg_mr_iova2 is what it calls for optional
# access flags. ibv_reg_dmabuf_mr came with rdma-core 34, ibv_is_fork_initialized with 35.
_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ibv_fork_init": (c_int, []),
    "ibv_is_fork_initialized": (c_int, []),
    "ibv_get_device_list": (POINTER(c_void_p), [POINTER(c_int)]),
    "ibv_free_device_list": (None, [POINTER(c_void_p)]),
    "ibv_get_device_name": (c_char_p, [c_void_p]),
    "ibv_open_device": (c_void_p, [c_void_p]),
    "ibv_close_device": (c_int, [c_void_p]),
    "ibv_query_device": (c_int, [c_void_p, c_void_p]),
    "ibv_query_port": (c_int, [c_void_p, c_uint8, c_void_p]),
    "ibv_alloc_pd": (c_void_p, [c_void_p]),
    "ibv_dealloc_pd": (c_int, [c_void_p]),
    "ibv_reg_mr_iova2": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_uint]),
    "ibv_reg_dmabuf_mr": (c_void_p, [c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int]),
    "ibv_dereg_mr": (c_int, [c_void_p]),
    "ibv_create_cq": (c_void_p, [c_void_p, c_int, c_void_p, c_void_p, c_int]),
    "ibv_destroy_cq": (c_int, [c_void_p]),
    "ibv_create_srq": (c_void_p, [c_void_p, c_void_p]),
    "ibv_destroy_srq": (c_int, [c_void_p]),
    "ibv_create_qp": (c_void_p, [c_void_p, c_void_p]),
    "ibv_destroy_qp": (c_int, [c_void_p]),
    "ibv_modify_qp": (c_int, [c_void_p, c_void_p, c_int]),
    "ibv_query_qp": (c_int, [c_void_p, c_void_p, c_int, c_void_p]),
    "ibv_create_ah": (c_void_p, [c_void_p, c_void_p]),
    "ibv_destroy_ah": (c_int, [c_void_p]),
}
_OPTIONAL: Final = ("ibv_reg_dmabuf_mr", "ibv_is_fork_initialized")
_FORK_UNNEEDED: Final = 2  # enum ibv_fork_status


@cache
def library() -> Any:
    """The library.

    Raises:
        TransportUnavailable: it is not installed, or too old.
    """
    try:
        loaded = ctypes.CDLL(NAME, use_errno=True)
    except OSError as error:
        raise TransportUnavailable(
            f"transport={TRANSPORT!r}: {error}; install libibverbs1 and ibverbs-providers"
        ) from None
    for name, (result, arguments) in _FUNCTIONS.items():
        if not hasattr(loaded, name):
            if name in _OPTIONAL:
                continue
            raise TransportUnavailable(f"transport={TRANSPORT!r}: {NAME} has no {name}: too old")
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    _prepare_for_forks(loaded)
    return loaded


def _prepare_for_forks(loaded: Any) -> None:
    """Before Linux 5.12 a fork could take registered pages away from this process; the library can
    keep them out of children. Where the kernel copies them instead it must not, or a child crashes
    on what else lies on such a page; but libraries of before 2024 (Debian 12's) do even then."""
    asked = getattr(loaded, "ibv_is_fork_initialized", None)
    if asked is not None and asked() == _FORK_UNNEEDED:
        return
    status = loaded.ibv_fork_init()
    if status:
        logger.warning("ibv_fork_init failed (%s): do not fork", os.strerror(status))


class VerbsError(TransportError):
    """A set-up call of libibverbs failed; ``code`` is its ``errno``."""

    def __init__(self, operation: str, code: int, where: str, hint: str = "") -> None:
        reason = os.strerror(code) if code > 0 else "unknown error"
        super().__init__(
            f"{where}: {operation} failed: {reason} (errno {code}){hint}",
            transport=TRANSPORT,
            operation=operation,
            code=code,
        )


def made(pointer: int | None, operation: str, where: str, hint: str = "") -> int:
    """``pointer``, unless a call returned none: then ``VerbsError`` of ``errno``."""
    if not pointer:
        raise VerbsError(operation, ctypes.get_errno(), where, hint)
    return pointer


def done(status: int, operation: str, where: str) -> None:
    """Raise ``VerbsError`` unless a call returned 0. It returns an ``errno``, or -1 and sets it."""
    if status:
        raise VerbsError(operation, status if status > 0 else ctypes.get_errno(), where)
