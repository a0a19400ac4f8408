"""An endpoint for datagrams: what a port's peers reach before they are connected."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from ctypes import POINTER, c_int, c_void_p
from typing import Any, Final

from moecomm.errors import TransportError
from moecomm.transport.verbs import abi, structures
from moecomm.transport.verbs.domains import ProtectionDomain
from moecomm.transport.verbs.library import TRANSPORT, library, made
from moecomm.transport.verbs.queues import CompletionQueue, DatagramQueuePair, Parameters, route
from moecomm.transport.verbs.statuses import explain

SLOT_BYTES: Final = 256  # one datagram with its routing header
NUM_SENDS: Final = 64
_BATCH: Final = 16
_RECEIVE: Final = 1 << 32  # in a request's number: it is a receive

_Post = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
_Poll = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)


class Datagrams:
    """A datagram queue pair with its memory. Sending may fail silently, as the network may.

    Args:
        num_receives: how many may come before ``receive`` is called again; more are lost.
        key: what senders must know.
        parameters: service level, traffic class and hop limit are used.
    """

    def __init__(
        self, domain: ProtectionDomain, num_receives: int, key: int, parameters: Parameters
    ) -> None:
        self._domain, device = domain, domain.device
        self._parameters = parameters
        self._slots = num_receives + NUM_SENDS
        self._memory = mmap.mmap(-1, self._slots * SLOT_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._post_send, self._post_recv = _Post(device.post_send), _Post(device.post_recv)
        self._poll = _Poll(device.poll_cq)
        self._routes: dict[tuple[int, bytes], int] = {}
        self._sends = deque(range(num_receives, self._slots))  # slots that are free to send from
        self._completions = CompletionQueue(device, self._slots)
        self._pair: DatagramQueuePair | None = None
        try:
            self._keys = domain.register(self._base, len(self._memory), access=abi.LOCAL_WRITE)
            self._pair = DatagramQueuePair(domain, self._completions, self._slots, key)
            self.number = self._pair.number
            for slot in range(num_receives):
                self._post_receive(slot)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes, lid: int, gid: bytes, number: int, key: int) -> bool:
        """Send ``data`` to the endpoint ``number`` at a port; ``False``: the queue is full.

        Raises:
            TransportError: there is no way to that port.
        """
        assert len(data) <= SLOT_BYTES - abi.GRH_BYTES
        assert self._pair is not None
        if not self._sends:
            return False
        slot = self._sends.popleft()
        ctypes.memmove(self._address(slot), data, len(data))
        sge = structures.Sge(self._address(slot), len(data), self._keys.local)
        request = structures.SendWr(
            wr_id=slot,
            sg_list=ctypes.addressof(sge),
            num_sge=1,
            opcode=abi.WR_SEND,
            send_flags=abi.SEND_SIGNALED,
            ah=self._route(lid, gid),
            remote_qpn=number,
            remote_qkey=key,
        )
        if self._request(self._post_send, request):
            self._sends.append(slot)
            return False
        return True

    def receive(self) -> list[bytes]:
        """The datagrams that have come; never blocks.

        Raises:
            TransportError: the endpoint is broken.
        """
        came: list[bytes] = []
        completions = (structures.Wc * _BATCH)()
        while True:
            address = ctypes.addressof(completions)
            count = self._poll(self._completions.pointer, _BATCH, address)
            if count < 0:
                raise self._broken("ibv_poll_cq", -5)
            for completion in completions[:count]:
                self._finish(completion, came)
            if count < _BATCH:
                return came

    def close(self) -> None:
        """Idempotent."""
        if self._pair is not None:
            self._pair.close()
        for handle in self._routes.values():
            library().ibv_destroy_ah(handle)
        self._routes.clear()
        self._completions.close()
        if self._base and hasattr(self, "_keys"):
            self._domain.deregister(self._keys)
        self._base = 0

    def _address(self, slot: int) -> int:
        return self._base + slot * SLOT_BYTES

    def _finish(self, completion: structures.Wc, came: list[bytes]) -> None:
        slot = completion.wr_id & (_RECEIVE - 1)
        if completion.status:
            what = "receive" if completion.wr_id & _RECEIVE else "send"
            raise self._broken(f"datagram {what}", completion.status, completion.vendor_err)
        if not completion.wr_id & _RECEIVE:
            self._sends.append(slot)
            return
        payload = self._address(slot) + abi.GRH_BYTES
        came.append(ctypes.string_at(payload, completion.byte_len - abi.GRH_BYTES))
        self._post_receive(slot)

    def _post_receive(self, slot: int) -> None:
        sge = structures.Sge(self._address(slot), SLOT_BYTES, self._keys.local)
        request = structures.RecvWr(wr_id=_RECEIVE | slot, sg_list=ctypes.addressof(sge), num_sge=1)
        status = self._request(self._post_recv, request)
        if status:
            raise self._broken("ibv_post_recv", -abs(status))

    def _request(self, post: Any, request: structures.SendWr | structures.RecvWr) -> int:
        assert self._pair is not None
        bad = c_void_p()
        place = ctypes.cast(ctypes.pointer(bad), POINTER(c_void_p))
        status: int = post(self._pair.pointer, ctypes.addressof(request), place)
        return status

    def _route(self, lid: int, gid: bytes) -> int:
        handle = self._routes.get((lid, gid))
        if handle is None:
            device = self._domain.device
            attributes = route(device, lid, gid, self._parameters)
            pointer = library().ibv_create_ah(self._domain.plain, ctypes.addressof(attributes))
            where = f"{self._domain.where}: from {device.gid} to GID {gid.hex(':', 2)}"
            handle = self._routes[lid, gid] = made(pointer, "ibv_create_ah", where)
        return handle

    def _broken(self, operation: str, code: int, detail: int = 0) -> TransportError:
        return TransportError(
            f"{self._domain.where}: {operation} failed: {explain(code, detail)}",
            transport=TRANSPORT,
            operation=operation,
            code=abs(code),
        )
