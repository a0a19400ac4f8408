"""libibverbs as functions of Python: ports of one process between which packets go where their
addresses let them. Enough of it to open ports and to connect them; the engine's loop is not here.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import pytest

from moecomm.transport.verbs import abi, datagrams, devices, domains, gids, queues
from moecomm.transport.verbs import structures as s
from moecomm.transport.verbs.devices import Port
from moecomm.transport.verbs.gids import Gid

_Call = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
_Poll = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)


@dataclass
class _Qp:
    port: Port
    number: int
    completions: deque[s.Wc]
    receives: deque[tuple[int, int]] = field(default_factory=deque)  # number, address
    route: s.AhAttr | None = None


class FakeVerbs:
    """The functions that ``library()`` has, for ``ports``.

    ``refuse``: function → the error number that it fails with. ``registered``: address and size of
    all memory that was.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = {number: port for number, port in enumerate(ports, 1)}
        self._tables = {port: gids.table(port.folder) for port in ports}
        self.lids = {port: 0 if port.roce else 100 + n for n, port in self._ports.items()}
        self.refuse: dict[str, int] = {}
        self.registered: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._blocks: list[Any] = []
        self._port_of: dict[int, Port] = {}  # of a context, or a protection domain
        self._completions: dict[int, deque[s.Wc]] = {}
        self._qps: dict[int, _Qp] = {}
        self._routes: dict[int, s.AhAttr] = {}
        self._functions = {
            abi.CONTEXT_POLL_CQ: _Poll(self._poll_cq),
            abi.CONTEXT_POST_SEND: _Call(self._post_send),
            abi.CONTEXT_POST_RECV: _Call(self._post_recv),
            abi.CONTEXT_POST_SRQ_RECV: _Call(lambda queue, request, bad: 0),
        }

    # ---- devices, domains, memory --------------------------------------------------------------

    def ibv_get_device_list(self, count: Any) -> Any:
        count._obj.value = len(self._ports)
        return (c_void_p * len(self._ports))(*self._ports)

    def ibv_free_device_list(self, found: Any) -> None: ...

    def ibv_get_device_name(self, device: int) -> bytes:
        return self._ports[device].device.encode()

    def ibv_open_device(self, device: int) -> int:
        if self._fails("ibv_open_device"):
            return 0
        context = self._block(512)
        for offset, function in self._functions.items():
            address = ctypes.cast(function, c_void_p).value
            c_uint64.from_address(context + offset).value = address or 0
        self._port_of[context] = self._ports[device]
        return context

    def ibv_query_port(self, context: int, number: int, place: int) -> int:
        found = s.PortAttr.from_address(place)
        found.active_mtu, found.max_msg_sz = 3, 1 << 30
        found.lid = self.lids[self._port_of[context]]
        return 0

    def ibv_query_device(self, context: int, place: int) -> int:
        found = s.DeviceAttr.from_address(place)
        found.max_qp = found.max_qp_wr = found.max_srq_wr = found.max_cqe = 1 << 16
        return 0

    def ibv_alloc_pd(self, context: int) -> int:
        domain = self._block(8)
        self._port_of[domain] = self._port_of[context]
        return domain

    def ibv_reg_mr_iova2(self, pd: int, address: int, nbytes: int, iova: int, access: int) -> int:
        self.registered.append((address, nbytes))
        return self._block(48)

    def routes(self) -> list[tuple[Port, s.AhAttr]]:
        """Of all connected queue pairs, and the port of each."""
        return [(qp.port, qp.route) for qp in self._qps.values() if qp.route is not None]

    def _gone(self, made: int) -> int:
        return 0

    ibv_close_device = ibv_dealloc_pd = ibv_dereg_mr = ibv_destroy_ah = _gone
    ibv_destroy_cq = ibv_destroy_srq = ibv_destroy_qp = _gone

    # ---- queues -----------------------------------------------------------------------------

    def ibv_create_cq(self, context: int, depth: int, *_: Any) -> int:
        made = self._block(8)
        self._completions[made] = deque()
        return made

    def ibv_create_srq(self, domain: int, attributes: int) -> int:
        return self._block(8)

    def ibv_create_qp(self, domain: int, attributes: int) -> int:
        given = s.QpInitAttr.from_address(attributes)
        made = self._block(64)
        with self._lock:
            number = 16 + len(self._qps)
            self._qps[made] = _Qp(self._port_of[domain], number, self._completions[given.recv_cq])
        c_uint32.from_address(made + abi.QP_NUM).value = number
        return made

    def ibv_modify_qp(self, qp: int, attributes: int, mask: int) -> int:
        given = s.QpAttr.from_address(attributes)
        if not mask & abi.QP_AV:
            return 0
        if self._fails("ibv_modify_qp"):
            return ctypes.get_errno()
        self._qps[qp].route = _copy(given.ah_attr)
        return 0

    def ibv_create_ah(self, domain: int, attributes: int) -> int:
        if self._fails("ibv_create_ah"):
            return 0
        made = self._block(8)
        self._routes[made] = _copy(s.AhAttr.from_address(attributes))
        return made

    # ---- packets ----------------------------------------------------------------------------

    def _post_send(self, qp: int, place: int, bad: int) -> int:
        with self._lock:
            sender, request = self._qps[qp], s.SendWr.from_address(place)
            data = s.Sge.from_address(request.sg_list)
            if request.opcode == abi.WR_RDMA_WRITE:
                assert sender.route is not None
                if self._arrives(sender.port, sender.route):
                    ctypes.memmove(request.ah, data.addr, data.length)  # the remote address
                return 0
            sender.completions.append(s.Wc(wr_id=request.wr_id, opcode=abi.WC_SEND))
            if self._arrives(sender.port, self._routes[request.ah]):
                self._receive(request.remote_qpn, ctypes.string_at(data.addr, data.length))
        return 0

    def _receive(self, number: int, data: bytes) -> None:
        (to,) = (qp for qp in self._qps.values() if qp.number == number)
        if to.receives:
            wr_id, address = to.receives.popleft()
            ctypes.memmove(address + abi.GRH_BYTES, data, len(data))
            nbytes = abi.GRH_BYTES + len(data)
            to.completions.append(s.Wc(wr_id=wr_id, opcode=abi.WC_RECV, byte_len=nbytes))

    def _arrives(self, port: Port, route: s.AhAttr) -> bool:
        """On InfiniBand to the port with that local id. On RoCE to an entry of some port with that
        address and the same version, in one subnet: the first 24 bits of an IPv4 address, the first
        64 of an IPv6 one."""
        if not port.roce:
            return route.dlid in self.lids.values()
        (source,) = (gid for gid in self._tables[port] if gid.index == route.grh.sgid_index)
        target = bytes(route.grh.dgid)
        return any(
            gid.raw == target and gid.kind == source.kind and _subnet(gid) == _subnet(source)
            for table in self._tables.values()
            for gid in table
        )

    def _post_recv(self, qp: int, place: int, bad: int) -> int:
        request = s.RecvWr.from_address(place)
        address = s.Sge.from_address(request.sg_list).addr
        with self._lock:
            self._qps[qp].receives.append((request.wr_id, address))
        return 0

    def _poll_cq(self, queue: int, most: int, place: int) -> int:
        with self._lock:
            count = min(most, len(self._completions[queue]))
            for n in range(count):
                came = self._completions[queue].popleft()
                ctypes.memmove(place + n * abi.WC_BYTES, ctypes.addressof(came), abi.WC_BYTES)
        return count

    def _fails(self, function: str) -> bool:
        ctypes.set_errno(self.refuse.get(function, 0))
        return function in self.refuse

    def _block(self, nbytes: int) -> int:
        with self._lock:
            self._blocks.append((c_uint64 * (nbytes // 8))())
            return ctypes.addressof(self._blocks[-1])


def _subnet(gid: Gid) -> bytes:
    return gid.raw[:15] if gid.is_ipv4 else gid.raw[:8]


def _copy(route: s.AhAttr) -> s.AhAttr:
    return s.AhAttr.from_buffer_copy(route)


@contextmanager
def installed(ports: Sequence[Port]) -> Iterator[FakeVerbs]:
    """The package's library is a fake one inside."""
    fake = FakeVerbs(ports)
    with pytest.MonkeyPatch.context() as patch:
        for module in (devices, domains, queues, datagrams):
            patch.setattr(module, "library", lambda: fake)
        yield fake
