"""Protection domains, and registering memory in them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

from moecomm.transport.allocation import registration_hint
from moecomm.transport.verbs import abi, structures
from moecomm.transport.verbs.devices import Device
from moecomm.transport.verbs.dmabuf import DmaBuf
from moecomm.transport.verbs.library import VerbsError, done, library, made

logger = logging.getLogger(__name__)

# Relaxed ordering: without it, PCIe orders every write behind the earlier ones, and fast NICs stay
# far below their rate into GPU memory. Nothing here relies on that order.
ACCESS: Final = abi.LOCAL_WRITE | abi.REMOTE_WRITE | abi.REMOTE_READ | abi.RELAXED_ORDERING
# What a driver or kernel without dma-buf registration answers.
_NO_DMABUF: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Keys:
    """A registration: its handle, and the keys that work requests carry."""

    handle: int
    local: int
    remote: int
    by_dmabuf: bool = False


class ProtectionDomain:
    """The protection domain of a device: a plain one for memory (``plain``), and around it, where
    the driver has that, a *parent domain* with a thread domain (``queues``). What is made in the
    latter promises to be used by one thread, and then takes no locks."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.where = str(device.port)
        lib = library()
        self.plain: int = made(lib.ibv_alloc_pd(device.context), "ibv_alloc_pd", self.where)
        self._thread_domain, self._parent = _single_threaded(device.context, self.plain)
        self._registered: set[int] = set()

    @property
    def queues(self) -> int:
        """The domain to make queues in."""
        return self._parent or self.plain

    def register(
        self,
        address: int,
        nbytes: int,
        *,
        access: int = ACCESS,
        dmabuf: DmaBuf | None = None,
        on_gpu: bool = False,
    ) -> Keys:
        """Let the device use ``nbytes`` at ``address``.

        ``dmabuf``: for memory of a GPU; stays the caller's. Where the driver refuses those, the
        address is registered as it is, which for a GPU needs the nvidia-peermem module.

        Raises:
            VerbsError: the device refuses; the message says what usually helps.
        """
        handle = None
        if dmabuf is not None:
            handle = self._try_dmabuf(dmabuf, address, nbytes, access)
        by_dmabuf = handle is not None
        if handle is None:
            lib = library()
            handle = lib.ibv_reg_mr_iova2(self.plain, address, nbytes, address, access)
            hint = registration_hint(ctypes.get_errno(), nbytes, on_gpu=on_gpu)
            handle = made(handle, "ibv_reg_mr", f"{self.where}: {nbytes} bytes", hint)
        self._registered.add(handle)
        local = structures.load(c_uint32, handle + abi.MR_LKEY)
        return Keys(handle, local, structures.load(c_uint32, handle + abi.MR_RKEY), by_dmabuf)

    def deregister(self, keys: Keys) -> None:
        """The inverse of ``register``; the range may be freed afterwards."""
        self._registered.discard(keys.handle)
        done(library().ibv_dereg_mr(keys.handle), "ibv_dereg_mr", self.where)

    def close(self) -> None:
        """Idempotent. Deregisters what is left; queues must be gone."""
        lib = library()
        for handle in self._registered:
            lib.ibv_dereg_mr(handle)
        self._registered.clear()
        if self._parent:
            lib.ibv_dealloc_pd(self._parent)
        if self._thread_domain:
            _inline(self.device.context, abi.VERBS_DEALLOC_TD, c_int, c_void_p)(self._thread_domain)
        if self.plain:
            lib.ibv_dealloc_pd(self.plain)
        self.plain = self._parent = self._thread_domain = 0

    def _try_dmabuf(self, dmabuf: DmaBuf, address: int, nbytes: int, access: int) -> int | None:
        """A registration of the dma-buf; ``None`` where that is not supported."""
        function = getattr(library(), "ibv_reg_dmabuf_mr", None)
        if function is None:
            logger.info("%s: libibverbs is too old for dma-buf", self.where)
            return None
        fd, offset = dmabuf
        handle: int | None = function(self.plain, offset, nbytes, address, fd, access)
        if handle:
            return handle
        code = ctypes.get_errno()
        if code not in _NO_DMABUF:
            raise VerbsError("ibv_reg_dmabuf_mr", code, f"{self.where}: {nbytes} bytes")
        logger.info("%s: no dma-buf registration (%s)", self.where, os.strerror(code))
        return None


def _single_threaded(context: int, plain: int) -> tuple[int, int]:
    """A thread domain and the parent domain with it; (0, 0) where the driver has none."""
    alloc_td = _inline(context, abi.VERBS_ALLOC_TD, c_void_p, c_void_p, c_void_p)
    alloc = _inline(context, abi.VERBS_ALLOC_PARENT_DOMAIN, c_void_p, c_void_p, c_void_p)
    if alloc_td is None or alloc is None:
        return 0, 0
    nothing = structures.TdInitAttr()
    thread_domain = alloc_td(context, ctypes.addressof(nothing))
    if not thread_domain:
        return 0, 0
    attributes = structures.ParentDomainInitAttr(pd=plain, td=thread_domain)
    parent = alloc(context, ctypes.addressof(attributes))
    if not parent:
        with contextlib.suppress(TypeError):  # a driver with one half of the pair
            _inline(context, abi.VERBS_DEALLOC_TD, c_int, c_void_p)(thread_domain)
        return 0, 0
    return thread_domain, parent


def _inline(context: int, offset: int, result: Any, *arguments: Any) -> Any:
    """A function that the header, not the library, offers: its address lies in the
    ``verbs_context`` around ``context``; ``None`` where the driver does not have it."""
    if structures.load(c_uint64, context + abi.CONTEXT_ABI_COMPAT) != abi.ABI_IS_EXTENDED:
        return None
    if structures.load(c_uint64, context + abi.VERBS_SIZE) < abi.VERBS_TAIL - offset:
        return None
    address = structures.load(c_uint64, context + offset)
    return ctypes.CFUNCTYPE(result, *arguments, use_errno=True)(address) if address else None
