"""``Mover``: moves a rank's bytes to and from remote peers, on a transfer engine of its own."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from moecomm.agreement import together
from moecomm.errors import TransportError, TransportUnavailable
from moecomm.group import Group
from moecomm.remote import DOOR_WORDS, PLAN_WORDS, WORD, RemoteAreas
from moecomm.remote_words import FREE, Kind, RemoteWords
from moecomm.transport.base import Region, RemoteRegion
from moecomm.transport.engine import EngineOptions, jit
from moecomm.transport.engine.blocks import Block, Parts
from moecomm.transport.engine.engine import TransferEngine
from moecomm.transport.proxy import state as P

logger = logging.getLogger(__name__)

PINGS_A_TIMEOUT: Final = 4  # of the kernels: long before they give up, it is known who is gone
GOODBYE_S: Final = 2.0
# A GPU's stream waits no longer for what peers send: it holds up whoever waits for the device, and
# what it would have done is then done by the receiving half.
PATIENCE_S: Final = 1.0
_POLL_S: Final = 0.0002
_MASK: Final = (1 << 64) - 1


def engine_options(
    areas: RemoteAreas, num_ranks: int, setup_s: float, **fields: Any
) -> EngineOptions:
    """What an engine needs to be for a mover."""
    doors = areas.slots * P.OPS_A_SLOT + P.OTHER_OPS
    return EngineOptions(
        commands=max(4096, 4 * num_ranks),
        operations=16,
        program_operations=doors,
        message_bytes=0,
        timeout_s=setup_s,
        **fields,
    )


class Mover:
    """The mover of one communicator's rank; runs until ``close``. Constructing is collective.

    Args:
        engine: over all ranks of ``group``; the mover's from now on, and closed by it.
        areas: of the layout.
        remotes: ranks that this one's kernels cannot reach.
        flags, bulk: the areas, in memory that lives until ``close`` has returned.
        timeout_s: of the kernels' waits.

    Raises:
        TransportError, PeerTimeout: memory cannot be registered, on this rank or another.
        TransportUnavailable: a write would be longer than the network interfaces take.
    """

    def __init__(
        self,
        engine: TransferEngine,
        group: Group,
        areas: RemoteAreas,
        remotes: Sequence[int],
        flags: Region,
        bulk: Region,
        timeout_s: float,
        setup_s: float,
    ) -> None:
        self._engine = engine
        self._areas = areas
        self._words = RemoteWords(areas, group.rank)
        self._remotes = tuple(remotes)
        self._timeout_s = timeout_s
        self._closed = False
        self.num_ranks = group.size
        try:
            function, peers = together(
                group, "register", lambda: self._register(flags, bulk), setup_s
            )
            told = group.all_gather(peers, setup_s, "register")
            self._block = self._fill(flags, bulk, [_unpack(blob) for blob in told])
            together(group, "connect", lambda: self._meet(setup_s), setup_s)
            engine.hold(self._block)
            engine.set_program(function, self._at("state"), takes_arrivals=True)
        except BaseException:
            engine.close()
            raise

    def failure(self) -> TransportError | None:
        """Why the mover gave up, or stands still: names the peer, or this rank where its own
        network interface, or the mover itself, cannot go on."""
        culprit = self._get(P.CULPRIT) - 1
        if culprit < 0:
            return self._engine.standstill(self._timeout_s / 2)
        return self._engine.explain_program(culprit, self._get(P.CULPRIT_CODE))

    def hold(self, *things: object) -> None:
        """Keep ``things`` alive as long as the engine may touch ``flags`` and ``bulk``."""
        self._engine.hold(*things)

    def counters(self) -> dict[str, tuple[int, int, int]]:
        """For each kind of write: how many have been posted, their bytes, and the nanoseconds from
        the first post of a door to the end of its last, summed over doors."""
        return {
            kind.name.lower(): (
                self._get(P.WRITES + WORD * kind),
                self._get(P.NBYTES + WORD * kind),
                self._get(P.MOVE_NS + WORD * kind),
            )
            for kind in Kind
        }

    def wake_streams(self) -> None:
        """From now on no stream of the GPU waits for this mover."""
        self._set(P.WAKE, 1)
        for n in range(self._words.landed(0, 0), self._words.landed(self._areas.slots, 0)):
            ctypes.c_int64.from_address(self._flags + WORD * n).value = FREE

    @property
    def stopped(self) -> bool:
        """Whether nothing touches ``flags`` and ``bulk`` any more: once closed, unless a library
        call hangs."""
        return self._engine.stopped

    @property
    def strange(self) -> int:
        """Immediates that came and that no mover sends."""
        return self._get(P.STRANGE)

    def close(self) -> None:
        """Serve what kernels have rung for, say good-bye to the peers, and stop. Idempotent;
        takes no longer than ``GOODBYE_S`` and the end of the engine."""
        if self._closed:
            return
        self._closed = True
        if self._engine.running:
            self._set(P.CLOSING, 1)
            deadline = time.monotonic() + min(GOODBYE_S, self._timeout_s)
            while self._get(P.CLOSED) == 0 and self._engine.running:
                if time.monotonic() > deadline:
                    logger.info("rank %d: peers do not take their good-bye", self._engine.rank)
                    break
                time.sleep(_POLL_S)
        self._engine.close()

    # ---- Set-up ---------------------------------------------------------------------------------

    def _register(self, flags: Region, bulk: Region) -> tuple[int, bytes]:
        """The program, and what peers need to write here."""
        longest = self._longest()
        if longest > self._engine.max_write_bytes:
            raise TransportUnavailable(
                f"transport={self._engine.transport!r}: one write may have {longest} bytes, and "
                f"its interfaces take {self._engine.max_write_bytes}: lower max_tokens"
            )
        jit.load("moecomm.transport.proxy.program")
        from moecomm.transport.proxy import program

        parts = [self._engine.register(region).to_bytes() for region in (flags, bulk)]
        return program.MOVE, len(parts[0]).to_bytes(4, "big") + b"".join(parts)

    def _meet(self, setup_s: float) -> bool:
        """A first write to and from every remote peer: with some networks it takes long, and the
        first step should not. After that, half the kernels' time is enough for a peer to take a
        write: what is wrong then is known, and told, before kernels can only guess."""
        engine = self._engine
        operation = engine.barrier(engine.peer_group(self._remotes), 0)
        engine.wait_imm(0, len(self._remotes), setup_s)
        engine.wait(operation, setup_s)
        engine.set_timeout(self._timeout_s / 2)
        return True

    def _longest(self) -> int:
        areas = self._areas
        records = areas.source_records * areas.record_bytes
        return max(areas.head_bytes, records, areas.source_rows * areas.row_bytes)

    def _fill(
        self, flags: Region, bulk: Region, peers: list[tuple[RemoteRegion, RemoteRegion]]
    ) -> Block:
        engine, areas, size = self._engine, self._areas, self.num_ranks
        self._flags = flags.address
        self._parts = parts = Parts()
        parts.add("state", P.BYTES)
        parts.add("remotes", WORD * len(self._remotes))
        parts.add("slots", P.SLOT_BYTES * areas.slots)
        parts.add("pairs", P.PAIR_BYTES * areas.slots * size)
        parts.add("peers", P.PEER_BYTES * size * engine.num_nics)
        parts.add("left", WORD * size)
        parts.add("nic_keys", WORD * engine.num_nics)
        parts.add("flag_keys", WORD * engine.num_nics)
        block = self._block = parts.allocate()
        for offset, value in (self._numbers() | self._addresses(flags, bulk)).items():
            self._set(offset, value)
        for n, rank in enumerate(self._remotes):
            block.put(parts.offset("remotes") + WORD * n, "=q", rank)
        for slot in range(areas.slots):
            block.put(parts.offset("slots") + P.SLOT_BYTES * slot + P.SLOT_EPOCH, "=q", 1)
        for nic in range(engine.num_nics):
            for name, region in (("nic_keys", bulk), ("flag_keys", flags)):
                key = engine.local_place(region, nic).key & _MASK
                block.put(parts.offset(name) + WORD * nic, "=Q", key)
            for rank in self._remotes:
                self._fill_peer(rank, nic, *peers[rank])
        return block

    def _fill_peer(self, rank: int, nic: int, flags: RemoteRegion, bulk: RemoteRegion) -> None:
        engine = self._engine
        abort_in = flags.part(WORD * self._words.abort_in, WORD)
        there, word = engine.remote_place(bulk, nic), engine.remote_place(abort_in, nic)
        source, nothing = engine.control_places(rank, nic)
        values = {
            P.PEER_BULK: there.address,
            P.PEER_BULK_KEY: there.key,
            P.PEER_ABORT_IN: word.address,
            P.PEER_FLAG_KEY: word.key,
            P.PEER_NOTHING: nothing.address,
            P.PEER_NOTHING_KEY: nothing.key,
            P.PEER_SOURCE: source.address,
            P.PEER_SOURCE_KEY: source.key,
        }
        first = self._parts.offset("peers") + P.PEER_BYTES * (rank * engine.num_nics + nic)
        for offset, value in values.items():
            self._block.put(first + offset, "=Q", value & _MASK)

    def _numbers(self) -> dict[int, int]:
        areas = self._areas
        numbers = {
            P.ENGINE: self._engine.state,
            P.RANK: self._words.rank,
            P.NUM_RANKS: self.num_ranks,
            P.NUM_NICS: self._engine.num_nics,
            P.NUM_SLOTS: areas.slots,
            P.NUM_REMOTES: len(self._remotes),
            P.FIRST_OP: self._engine.program_operations.start,
            P.PING_NS: int(self._timeout_s * 1e9 / PINGS_A_TIMEOUT),
            P.DOOR_BYTES: DOOR_WORDS * WORD,
            P.PLAN_BYTES: PLAN_WORDS * WORD,
            P.CHANNELS: areas.channels,
            P.PRIVATE: areas.private_records,
            P.HEAD_BYTES: areas.head_bytes,
            P.RECORD_BYTES: areas.record_bytes,
            P.ROW_BYTES: areas.row_bytes,
            P.STAGED_RECORDS: areas.staged_records,
            P.SOURCE_RECORDS: areas.source_records,
            P.STAGED_ROWS: areas.staged_rows,
            P.LANDING_ROWS: areas.landing_rows,
            P.HEAD_SHARE: WORD * (areas.head_words - 1),
            P.PATIENCE_NS: int(min(self._timeout_s, PATIENCE_S) * 1e9),
        }
        for name in ("out_head", "in_head", "out_record", "in_record", "out_row", "in_row"):
            numbers[getattr(P, name.upper())] = areas.bulk[name].offset
        return numbers

    def _addresses(self, flags: Region, bulk: Region) -> dict[int, int]:
        areas, at = self._areas, self._at
        addresses = {
            P.BULK: bulk.address,
            P.REMOTES: at("remotes"),
            P.SLOTS: at("slots"),
            P.PAIRS: at("pairs"),
            P.PEERS: at("peers"),
            P.LEFT: at("left"),
            P.NIC_KEYS: at("nic_keys"),
            P.FLAG_KEYS: at("flag_keys"),
        }
        for name in ("door", "plan", "landed", "arrived", "abort_out", "abort_in"):
            addresses[getattr(P, name.upper())] = flags.address + areas.flags[name].offset
        return addresses

    def _at(self, part: str) -> int:
        return self._parts.address(part)

    def _get(self, offset: int) -> int:
        return self._block.words[(self._parts.offset("state") + offset) // WORD]

    def _set(self, offset: int, value: int) -> None:
        self._block.words[(self._parts.offset("state") + offset) // WORD] = value


def _unpack(blob: bytes) -> tuple[RemoteRegion, RemoteRegion]:
    """``flags`` and ``bulk`` of a peer."""
    size = int.from_bytes(blob[:4], "big")
    return RemoteRegion.from_bytes(blob[4 : 4 + size]), RemoteRegion.from_bytes(blob[4 + size :])
