"""Completion queues, shared receive queues and queue pairs, and how deep each of them is."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32
from dataclasses import dataclass
from typing import Final

from moecomm.errors import ConfigError, TransportUnavailable
from moecomm.transport.engine.provider import Sizing
from moecomm.transport.verbs import abi, structures
from moecomm.transport.verbs.devices import Device, Limits
from moecomm.transport.verbs.domains import ProtectionDomain
from moecomm.transport.verbs.gids import Gid
from moecomm.transport.verbs.library import done, library, made
from moecomm.transport.verbs.posting_state import POLL_BATCH

MOST_TO_ONE_PEER: Final = (
    256  # a deeper send queue only takes memory: it is drained in microseconds
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a connection is made with; ``ibv_modify_qp(3)`` has the units.

    The defaults give up on a silent peer after about a second: 4.096 µs · 2^``timeout`` is one
    wait for an acknowledgement, and there are ``retry_count`` of them and some slack in devices.
    To soft-RoCE a ``retry_count`` of 7 means for ever. An ``rnr_retry`` of 7 means that to all: a
    receiver that is late to post receives is no error.
    """

    timeout: int = 14
    retry_count: int = 6
    rnr_retry: int = 7
    min_rnr_timer: int = 12  # 0.64 ms
    service_level: int = 0
    traffic_class: int = 0
    hop_limit: int = 64

    def __post_init__(self) -> None:
        for name, highest in _HIGHEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
                raise ConfigError(f"{name}={value!r}: must be an integer from 0 to {highest}")


_HIGHEST: Final = {
    "timeout": 31,
    "retry_count": 7,
    "rnr_retry": 7,
    "min_rnr_timer": 31,
    "service_level": 15,
    "traffic_class": 255,
    "hop_limit": 255,
}


@dataclass(frozen=True, slots=True)
class Depths:
    """How many requests each queue of a device holds.

    ``posts``: of all queue pairs together, ``send``: of one. ``receive``: of a shared receive
    queue. ``completions``: of the completion queue of it all.
    """

    posts: int
    send: int
    receive: int
    completions: int


def depths(sizing: Sizing, limits: Limits, where: str) -> Depths:
    """Depths with which no queue overruns.

    A completion queue that overruns is lost for good. It gets room for every post and every
    arrival that the engine lets be under way, and for one request more per queue pair, the last
    step of connecting: after an error each of them completes, also those that asked for no
    completion. There are ``POLL_BATCH`` receives more than arrivals: so many may wait for the next
    poll to be posted again.

    Raises:
        TransportUnavailable: the device is too small.
    """
    spare = 2 * sizing.num_peers + sizing.num_messages
    posts = min(sizing.tx_depth, limits.max_cqe - sizing.rx_depth - spare)
    send = min(posts, MOST_TO_ONE_PEER, limits.max_qp_wr - 1)
    kinds = 2 if sizing.num_messages else 1
    receive = sizing.rx_depth + POLL_BATCH
    if posts < 1 or send < 1 or receive > limits.max_srq_wr:
        raise TransportUnavailable(
            f"{where}: {sizing.rx_depth} arrivals of {sizing.num_peers} peers are too many for it "
            f"(at most {limits.max_cqe} completions, {limits.max_srq_wr} shared receives, of which "
            f"{POLL_BATCH} are not counted on)"
        )
    if kinds * sizing.num_peers + 1 > limits.max_qp:
        raise TransportUnavailable(
            f"{where}: {sizing.num_peers} peers need {kinds * sizing.num_peers + 1} queue pairs, "
            f"it has {limits.max_qp}"
        )
    return Depths(posts, send, receive, posts + sizing.rx_depth + spare)


class CompletionQueue:
    """``depth`` completions at least."""

    def __init__(self, device: Device, depth: int) -> None:
        where = f"{device.port}: {depth} completions"
        self.pointer: int = made(
            library().ibv_create_cq(device.context, depth, None, None, 0), "ibv_create_cq", where
        )

    def close(self) -> None:
        """Idempotent; its queue pairs must be gone."""
        if self.pointer:
            library().ibv_destroy_cq(self.pointer)
            self.pointer = 0


class SharedReceiveQueue:
    """``depth`` receives at least, for all queue pairs that are made with it."""

    def __init__(self, domain: ProtectionDomain, depth: int) -> None:
        attributes = structures.SrqInitAttr(max_wr=depth, max_sge=1)
        pointer = library().ibv_create_srq(domain.queues, ctypes.addressof(attributes))
        self.pointer: int = made(pointer, "ibv_create_srq", f"{domain.where}: {depth} receives")

    def close(self) -> None:
        """Idempotent; its queue pairs must be gone."""
        if self.pointer:
            library().ibv_destroy_srq(self.pointer)
            self.pointer = 0


@dataclass(frozen=True, slots=True)
class Target:
    """The peer's end of a connection: its queue pair, and where that is."""

    qp_num: int
    psn: int
    mtu: int
    lid: int
    gid: bytes


class QueuePair:
    """One queue pair; subclasses know how to make it ready."""

    def __init__(
        self,
        domain: ProtectionDomain,
        kind: int,
        completions: CompletionQueue,
        cap: structures.QpCap,
        receives: SharedReceiveQueue | None = None,
    ) -> None:
        self.domain = domain
        self.device = domain.device
        attributes = structures.QpInitAttr(
            send_cq=completions.pointer,
            recv_cq=completions.pointer,
            srq=receives.pointer if receives is not None else None,
            cap=cap,
            qp_type=kind,
        )
        pointer = library().ibv_create_qp(domain.queues, ctypes.addressof(attributes))
        self.pointer: int = made(pointer, "ibv_create_qp", domain.where)
        self.number = structures.load(c_uint32, self.pointer + abi.QP_NUM)
        self.inline_bytes = int(attributes.cap.max_inline_data)

    def state(self) -> int:
        """One of ``abi.STATE_*``."""
        attributes, initial = structures.QpAttr(), structures.QpInitAttr()
        places = ctypes.addressof(attributes), ctypes.addressof(initial)
        status = library().ibv_query_qp(self.pointer, places[0], abi.QP_STATE, places[1])
        done(status, "ibv_query_qp", self.domain.where)
        return int(attributes.qp_state)

    def close(self) -> None:
        """Idempotent. What is still in the queue is dropped."""
        if self.pointer:
            library().ibv_destroy_qp(self.pointer)
            self.pointer = 0

    def _modify(self, attributes: structures.QpAttr, mask: int, operation: str) -> None:
        status = library().ibv_modify_qp(self.pointer, ctypes.addressof(attributes), mask)
        done(status, operation, self.domain.where)


class ReliableQueuePair(QueuePair):
    """Reliable and connected to one peer. Its first packet has number ``psn``."""

    def __init__(
        self,
        domain: ProtectionDomain,
        completions: CompletionQueue,
        receives: SharedReceiveQueue,
        depth: int,
        psn: int,
        inline_bytes: int = 0,
    ) -> None:
        cap = structures.QpCap(max_send_wr=depth + 1, max_send_sge=1, max_inline_data=inline_bytes)
        super().__init__(domain, abi.QPT_RC, completions, cap, receives)
        self.psn = psn

    def connect(self, target: Target, parameters: Parameters) -> None:
        """Make it ready to receive from, and to send to, ``target``."""
        port = self.device.port.number
        attributes = structures.QpAttr(qp_state=abi.STATE_INIT, port_num=port)
        attributes.qp_access_flags = abi.LOCAL_WRITE | abi.REMOTE_WRITE | abi.REMOTE_READ
        mask = abi.QP_STATE | abi.QP_ACCESS_FLAGS | abi.QP_PKEY_INDEX | abi.QP_PORT
        self._modify(attributes, mask, "connect (to INIT)")
        attributes = structures.QpAttr(
            qp_state=abi.STATE_RTR,
            path_mtu=min(self.device.mtu, target.mtu),
            dest_qp_num=target.qp_num,
            rq_psn=target.psn,  # where the peer starts
            max_dest_rd_atomic=1,
            min_rnr_timer=parameters.min_rnr_timer,
            ah_attr=route(self.device, target.lid, target.gid, parameters),
        )
        mask = abi.QP_STATE | abi.QP_AV | abi.QP_PATH_MTU | abi.QP_DEST_QPN | abi.QP_RQ_PSN
        mask |= abi.QP_MAX_DEST_RD_ATOMIC | abi.QP_MIN_RNR_TIMER
        self._modify(attributes, mask, "connect (to RTR)")
        attributes = structures.QpAttr(
            qp_state=abi.STATE_RTS,
            timeout=parameters.timeout,
            retry_cnt=parameters.retry_count,
            rnr_retry=parameters.rnr_retry,
            sq_psn=self.psn,  # where this side starts
            max_rd_atomic=1,
        )
        mask = abi.QP_STATE | abi.QP_TIMEOUT | abi.QP_RETRY_CNT | abi.QP_RNR_RETRY
        mask |= abi.QP_SQ_PSN | abi.QP_MAX_QP_RD_ATOMIC
        self._modify(attributes, mask, "connect (to RTS)")


class DatagramQueuePair(QueuePair):
    """Unreliable: sends to, and receives from, whoever knows its number and ``key``."""

    def __init__(
        self, domain: ProtectionDomain, completions: CompletionQueue, depth: int, key: int
    ) -> None:
        cap = structures.QpCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1)
        super().__init__(domain, abi.QPT_UD, completions, cap)
        self.key = key
        port = self.device.port.number
        attributes = structures.QpAttr(qp_state=abi.STATE_INIT, port_num=port, qkey=key)
        mask = abi.QP_STATE | abi.QP_PKEY_INDEX | abi.QP_PORT | abi.QP_QKEY
        self._modify(attributes, mask, "datagrams (to INIT)")
        self._modify(structures.QpAttr(qp_state=abi.STATE_RTR), abi.QP_STATE, "datagrams (to RTR)")
        attributes = structures.QpAttr(qp_state=abi.STATE_RTS)
        self._modify(attributes, abi.QP_STATE | abi.QP_SQ_PSN, "datagrams (to RTS)")


def route(device: Device, lid: int, gid: bytes, parameters: Parameters) -> structures.AhAttr:
    """The way from ``device`` to the port with ``lid`` (InfiniBand) or ``gid`` (RoCE)."""
    attributes = structures.AhAttr(port_num=device.port.number, sl=parameters.service_level)
    # Inside an InfiniBand subnet the local id is enough; RoCE, and other subnets (whose gid has
    # another prefix), need the global header.
    if device.port.roce or gid[:8] != device.gid.raw[:8]:
        attributes.is_global = 1
        attributes.grh.dgid[:] = gid
        attributes.grh.sgid_index = device.gid.index
        attributes.grh.hop_limit = parameters.hop_limit
        attributes.grh.traffic_class = parameters.traffic_class
    if not device.port.roce:
        attributes.dlid = lid
    return attributes


def same_kind(mine: Gid, theirs: bytes) -> bool:
    """Whether RoCE can connect the two: an IPv4 address does not reach an IPv6 one."""
    return mine.is_ipv4 == Gid(0, theirs, mine.kind).is_ipv4
