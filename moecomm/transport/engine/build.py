"""The memory of an engine: its records, rings and tables, filled in before the loop starts."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from moecomm.transport.engine import records as R
from moecomm.transport.engine import state as S
from moecomm.transport.engine.blocks import Block, Parts, c_address
from moecomm.transport.engine.options import EngineOptions, power_of_two
from moecomm.transport.engine.provider import MAX_BURST, Nic, Sizing

_C_FUNCTIONS: Final = {
    S.SCHED_YIELD: "sched_yield",
    S.USLEEP: "usleep",
    S.CLOCK_GETTIME: "clock_gettime",
    S.CALLOC: "calloc",
    S.MEMCPY: "memcpy",
}
_LEAVES: Final = 1 << (32 - S.IMM_LEAF_BITS)


@dataclass(frozen=True, slots=True)
class ControlPeer:
    """Where a peer's control row for this rank is, for one NIC."""

    remote_row: int
    remote_key: int


class Memory:
    """Everything that the loop touches, apart from what users register.

    Args:
        nics: open.
        num_peers: of each, this rank included.
        options: sizes.
        sizing: what the NICs were opened for.
    """

    def __init__(
        self, nics: Sequence[Nic], num_peers: int, options: EngineOptions, sizing: Sizing
    ) -> None:
        self._nics = nics
        self._peers = num_peers
        self._options = options
        self._sizing = sizing
        self.num_operations = options.operations + options.program_operations
        self.ring_size = power_of_two(options.commands)
        self.inbox_size = power_of_two(MAX_BURST * len(nics))  # what one turn can bring
        self._channels = len(nics) * num_peers
        self.message_entry = sizing.message_bytes + S.MESSAGE_HEADER
        self.message_places = options.messages_per_peer * num_peers if sizing.message_bytes else 0
        self._parts = self._plan()
        self.block = self._parts.allocate()
        self.engine = self._parts.address("engine")
        self._directory = mmap.mmap(-1, _LEAVES * 8)
        self._anchor = ctypes.c_char.from_buffer(self._directory)
        self.control = Block(
            self._channels * S.ROW_BYTES + self.message_places * self.message_entry
        )
        self._fill_engine()
        for index, nic in enumerate(nics):
            self._fill_nic(index, nic)
        self._fill_lists()

    def word(self, offset: int) -> int:
        """The engine's word at ``offset``; for words that one side alone writes."""
        return self.block.words[(self._parts.offset("engine") + offset) // 8]

    def set_word(self, offset: int, value: int) -> None:
        """See ``word``."""
        self.block.words[(self._parts.offset("engine") + offset) // 8] = value

    def give_arrivals(self, to_program: bool) -> None:
        """Whether immediates go to the program, or are counted. While the loop stands still."""
        self.set_word(S.INBOX, self._parts.address("inbox") if to_program else 0)
        self.set_word(S.INBOX_SIZE, self.inbox_size)

    def operation(self, slot: int) -> memoryview:
        """The words of an operation record."""
        first = (self._parts.offset("operations") + slot * S.OP_BYTES) // 8
        return self.block.words[first : first + S.OP_BYTES // 8]

    def row(self, nic: int, peer: int) -> int:
        """Offset of a control row in ``control``."""
        return (nic * self._peers + peer) * S.ROW_BYTES

    def message_place(self, peer: int, number: int) -> int:
        """Offset in ``control`` of the place that message ``number`` to ``peer`` is sent from."""
        per_peer = self._options.messages_per_peer
        place = peer * per_peer + number % per_peer
        return self._channels * S.ROW_BYTES + place * self.message_entry

    def received(self, number: int) -> memoryview:
        """The entry of message ``number`` in the message ring."""
        size = self.word(S.MESSAGES_SIZE)
        first = self._parts.offset("messages") + (number & (size - 1)) * self.message_entry
        return self.block.bytes[first : first + self.message_entry]

    def set_channel(self, nic: int, peer: int, other: ControlPeer, control_key: int) -> None:
        """What the loop needs to reach a peer's control row."""
        offset = self._parts.offset("channels") + (nic * self._peers + peer) * S.CHANNEL_BYTES
        words = {
            S.CH_ROW: self.control.address + self.row(nic, peer),
            S.CH_REMOTE_ROW: other.remote_row,
            S.CH_REMOTE_KEY: other.remote_key,
        }
        for field, value in words.items():
            self.block.put(offset + field, "=Q", value & (1 << 64) - 1)
        nic_at = self._parts.offset("nics") + nic * S.NIC_BYTES
        self.block.put(nic_at + S.NIC_CONTROL_KEY, "=Q", control_key & (1 << 64) - 1)

    def in_flight(self) -> int:
        """Posts that are not done, of all channels; while the loop stands still."""
        first = (self._parts.offset("channels") + S.CH_IN_FLIGHT) // 8
        stride = S.CHANNEL_BYTES // 8
        return sum(self.block.words[first : first + self._channels * stride : stride])

    def arrived(self, imm: int) -> int:
        """How often ``imm`` has come beyond what expectations have used up."""
        leaf = ctypes.c_int64.from_address(self._leaf_at(imm >> S.IMM_LEAF_BITS)).value
        if leaf == 0:
            return 0
        counter = leaf + (imm & (1 << S.IMM_LEAF_BITS) - 1) * S.IMM_BYTES
        arrived, used = (ctypes.c_int64 * 2).from_address(counter)
        return int(arrived) - int(used)

    def free(self) -> None:
        """Give back the counters. Only after the loop has ended."""
        release = ctypes.CDLL(None).free
        release.argtypes = [ctypes.c_void_p]
        leaves = np.frombuffer(self._directory, np.int64)
        for index in leaves.nonzero()[0]:
            release(int(leaves[index]))
            leaves[index] = 0

    def _leaf_at(self, index: int) -> int:
        return ctypes.addressof(self._anchor) + index * 8

    def _plan(self) -> Parts:
        parts, nics = Parts(), len(self._nics)
        places = self.ring_size + MAX_BURST * nics
        parts.add("engine", S.ENGINE_BYTES)
        parts.add("nics", nics * S.NIC_BYTES)
        parts.add("channels", self._channels * S.CHANNEL_BYTES)
        parts.add("operations", self.num_operations * S.OP_BYTES)
        parts.add("done", 4 * power_of_two(self.num_operations))
        parts.add("ring", self.ring_size * R.POST_BYTES)
        parts.add("program_ring", self.ring_size * R.POST_BYTES)
        parts.add("inbox", self.inbox_size * 4)
        parts.add("waiting", places * R.POST_BYTES)
        parts.add("waiting_free", places * 4)
        parts.add("active", 4 * power_of_two(self._channels))
        parts.add("control_queue", 4 * power_of_two(self._channels))
        parts.add("messages", power_of_two(self.message_places) * self.message_entry)
        for index, nic in enumerate(self._nics):
            depth = nic.limits.tx_depth
            parts.add(f"slots {index}", depth * S.SLOT_BYTES)
            parts.add(f"free {index}", 4 * power_of_two(depth))
            parts.add(f"batch {index}", MAX_BURST * R.POST_BYTES)
            parts.add(f"events {index}", MAX_BURST * R.EVENT_BYTES)
        return parts

    def _fill_engine(self) -> None:
        options, address = self._options, self._parts.address
        places = self.ring_size + MAX_BURST * len(self._nics)
        words = {
            S.NUM_NICS: len(self._nics),
            S.NUM_PEERS: self._peers,
            S.NICS: address("nics"),
            S.NICS_END: address("nics") + len(self._nics) * S.NIC_BYTES,
            S.CHANNELS: address("channels"),
            S.RING: address("ring"),
            S.RING_SIZE: self.ring_size,
            S.OPERATIONS: address("operations"),
            S.DONE: address("done"),
            S.DONE_SIZE: power_of_two(self.num_operations),
            S.IMM_DIRECTORY: ctypes.addressof(self._anchor),
            S.WAITING: address("waiting"),
            S.WAITING_FREE: address("waiting_free"),
            S.WAITING_COUNT: places,
            S.WAITING_KEPT: MAX_BURST * len(self._nics),
            S.ACTIVE: address("active"),
            S.ACTIVE_SIZE: power_of_two(self._channels),
            S.CONTROL_QUEUE: address("control_queue"),
            S.ABORT_WORDS: self.control.address,
            S.MESSAGES: address("messages"),
            S.MESSAGES_SIZE: power_of_two(self.message_places),
            S.MESSAGE_BYTES: self.message_entry,
            S.PROGRAM_RING: address("program_ring"),
            S.TIMEOUT_NS: int(options.timeout_s * 1e9),
            S.SPIN_TURNS: options.spin_turns,
            S.YIELD_TURNS: options.yield_turns,
            S.SLEEP_US: options.sleep_us,
            S.TIMESPEC: address("engine") + S.ENGINE_BYTES - 16,
        }
        words |= {offset: c_address(name) for offset, name in _C_FUNCTIONS.items()}
        for offset, value in words.items():
            self.set_word(offset, value)

    def _fill_nic(self, index: int, nic: Nic) -> None:
        offset = self._parts.offset("nics") + index * S.NIC_BYTES
        limits, hooks, address = nic.limits, nic.hooks, self._parts.address
        window = self._sizing.rx_depth // self._peers
        words = {
            S.NIC_POST: hooks.post,
            S.NIC_POLL: hooks.poll,
            S.NIC_STATE: hooks.state,
            S.NIC_TX_DEPTH: limits.tx_depth,
            S.NIC_PEER_DEPTH: limits.peer_depth,
            S.NIC_RX_DEPTH: self._sizing.rx_depth,
            S.NIC_WINDOW: window,
            S.NIC_SLOTS: address(f"slots {index}"),
            S.NIC_FREE: address(f"free {index}"),
            S.NIC_FREE_MASK: power_of_two(limits.tx_depth) - 1,
            S.NIC_FREE_TAIL: limits.tx_depth,
            S.NIC_BATCH: address(f"batch {index}"),
            S.NIC_EVENTS: address(f"events {index}"),
            S.NIC_GRANTED: window * self._peers,
            S.NIC_SCAN_AT: window >> 1,
            S.NIC_INDEX: index,
            S.NIC_HALF: max(window >> 1, 1),
        }
        for field, value in words.items():
            self.block.put(offset + field, "=q", value)
        for slot in range(limits.tx_depth):
            self.block.put(self._parts.offset(f"free {index}") + 4 * slot, "=I", slot)
        for peer in range(self._peers):
            channel = self._parts.offset("channels")
            channel += (index * self._peers + peer) * S.CHANNEL_BYTES
            self.block.put(channel + S.CH_NIC, "=q", address("nics") + index * S.NIC_BYTES)
            self.block.put(channel + S.CH_GRANTED, "=q", window)
            self.block.put(channel + S.CH_TOLD_GRANT, "=q", window)
            self.control.put(self.row(index, peer) + S.ROW_GRANTED, "=q", window)

    def _fill_lists(self) -> None:
        first = self._parts.offset("waiting_free")
        for number in range(self.word(S.WAITING_COUNT)):
            self.block.put(first + 4 * number, "=I", number + 1)
