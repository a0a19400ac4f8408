"""The memory that ``hot.py`` works on: functions, templates, contexts, receives."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm.transport.base import Region
from moecomm.transport.efa import abi, hot
from moecomm.transport.engine.blocks import Block, Parts
from moecomm.transport.engine.provider import Sizing


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Addresses of an endpoint's functions, and what they are called on."""

    writemsg: int
    sendmsg: int
    recvmsg: int
    cq_read: int
    cq_readerr: int
    ep: int
    cq: int


class PostingState:
    """What ``Hooks.state`` of a libfabric endpoint points to.

    Args:
        functions: see ``Functions``.
        sizing: how many peers and messages.
        depth: posts in flight.
        flags: of every post.
        more: added to all posts of a batch but the last.
    """

    def __init__(
        self, functions: Functions, sizing: Sizing, depth: int, flags: int, more: int
    ) -> None:
        self._parts = parts = Parts()
        parts.add("state", hot.STATE_BYTES)
        parts.add("peers", 8 * sizing.num_peers)
        parts.add("contexts", depth * abi.CONTEXT_BYTES)
        parts.add("receives", sizing.num_messages * abi.CONTEXT_BYTES)
        parts.add("idle", 4 * sizing.num_messages)
        self._block = parts.allocate()
        self._buffers = Block(sizing.num_messages * sizing.message_bytes)
        self.address = parts.address("state")
        for offset, value in {
            hot.WRITEMSG: functions.writemsg,
            hot.SENDMSG: functions.sendmsg,
            hot.RECVMSG: functions.recvmsg,
            hot.CQ_READ: functions.cq_read,
            hot.CQ_READERR: functions.cq_readerr,
            hot.EP: functions.ep,
            hot.CQ: functions.cq,
            hot.PEERS: parts.address("peers"),
            hot.CONTEXTS: parts.address("contexts"),
            hot.NUM_CONTEXTS: depth,
            hot.MORE: more,
            hot.FLAGS: flags,
            hot.RECEIVES: parts.address("receives"),
            hot.NUM_RECEIVES: sizing.num_messages,
            hot.RECEIVE_BUFFERS: self._buffers.address,
            hot.RECEIVE_BYTES: sizing.message_bytes,
            hot.IDLE: parts.address("idle"),
            hot.NUM_IDLE: sizing.num_messages,
        }.items():
            self._block.put(parts.offset("state") + offset, "=Q", value)
        for number in range(sizing.num_messages):
            self._block.put(parts.offset("idle") + 4 * number, "=I", number)
        self._fill_templates()
        self.receives = None
        if sizing.num_messages:
            self.receives = Region(self._buffers.address, self._buffers.nbytes)

    def set_peer(self, number: int, address: int) -> None:
        """The ``fi_addr_t`` of a peer."""
        self._block.put(self._parts.offset("peers") + 8 * number, "=Q", address)

    def set_receive_key(self, key: int) -> None:
        """The local key of ``receives``."""
        self._block.put(self._parts.offset("state") + hot.RECEIVE_DESC, "=Q", key)

    def _fill_templates(self) -> None:
        """What is the same in every post. One iovec also where nothing is written: rxm crashes on
        none."""
        state = self.address
        for offset, value in {
            hot.MSG_RMA + abi.MSG_RMA_IOV: state + hot.IOV,
            hot.MSG_RMA + abi.MSG_RMA_DESC: state + hot.DESC,
            hot.MSG_RMA + abi.MSG_RMA_IOV_COUNT: 1,
            hot.MSG_RMA + abi.MSG_RMA_RMA_IOV: state + hot.RMA_IOV,
            hot.MSG_RMA + abi.MSG_RMA_RMA_IOV_COUNT: 1,
            hot.MSG + abi.MSG_IOV: state + hot.IOV,
            hot.MSG + abi.MSG_DESC: state + hot.DESC,
            hot.MSG + abi.MSG_IOV_COUNT: 1,
        }.items():
            self._block.put(self._parts.offset("state") + offset, "=Q", value)
