"""The memory that posting and polling work on (see ``hooks``): its words, and how it is filled."""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecomm.transport.engine.provider import MAX_BURST
from moecomm.transport.verbs import structures
from moecomm.transport.verbs.abi import RECV_WR_BYTES, SEND_WR_BYTES, SGE_BYTES, WC_BYTES

POLL_BATCH: Final = 32
# Words of the state.
POST_SEND: Final = 0
POST_SRQ_RECV: Final = 8
POLL_CQ: Final = 16
CQ: Final = 24
PEERS: Final = 32  # table of PEER_BYTES: queue pair for writes, queue pair for messages
REQUESTS: Final = 40  # MAX_BURST send requests, each with its sge
SGES: Final = 48
BAD: Final = 56
COMPLETIONS: Final = 64  # POLL_BATCH of them
WRITE_SRQ: Final = 72
EMPTY_RECEIVES: Final = 80  # POLL_BATCH receives of no bytes
MESSAGE_SRQ: Final = 88
MESSAGE_RECEIVES: Final = 96  # one request for each message buffer
MESSAGE_BASE: Final = 104
MESSAGE_BYTES: Final = 112
USED: Final = 120  # numbers of message buffers that the program still reads ...
NUM_USED: Final = 128  # ... and how many: they are posted again at the next poll,
NUM_EMPTY: Final = 152  # as are so many receives of no bytes
INLINE_BYTES: Final = 136
LOST: Final = 144  # receives that completed with an error
STATE_WORDS: Final = 20
PEER_BYTES: Final = 16
# Bits of a request's number (wr_id). Sends have the post's context in the low 32.
EMPTY_RECEIVE: Final = 1 << 62
MESSAGE_RECEIVE: Final = 1 << 61
OWN_REQUEST: Final = 1 << 60  # not the engine's: it gives no event
# In a registration's local key: the processor can read the memory, so small writes may be copied
# into the request.
HOST_MEMORY: Final = 1 << 32

_Post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class State:
    """The memory of ``post`` and ``poll``; keeps everything in it alive.

    Args:
        functions: addresses of the library's post_send, post_srq_recv and poll_cq.
        queue: the completion queue.
        num_peers: most peers.
        writes, messages: the shared receive queues; ``messages`` 0: none.
        inline_bytes: up to which length a queue pair takes payload inside a request.
    """

    def __init__(
        self,
        functions: tuple[int, int, int],
        queue: int,
        num_peers: int,
        writes: int,
        messages: int = 0,
        inline_bytes: int = 0,
    ) -> None:
        self._words = _memory(STATE_WORDS * 8)
        self._parts: list[NDArray[np.uint8]] = []
        self.address = int(self._words.ctypes.data)
        self._peers = self._part(max(num_peers, 1) * PEER_BYTES)
        for word, value in zip((POST_SEND, POST_SRQ_RECV, POLL_CQ), functions, strict=True):
            self._set(word, value)
        self._set(CQ, queue)
        self._set(PEERS, self._peers)
        self._set(REQUESTS, self._part(MAX_BURST * SEND_WR_BYTES))
        self._set(SGES, self._part(MAX_BURST * SGE_BYTES))
        self._set(BAD, self._part(8))
        self._set(COMPLETIONS, self._part(POLL_BATCH * WC_BYTES))
        self._set(WRITE_SRQ, writes)
        self._set(EMPTY_RECEIVES, self._part(POLL_BATCH * RECV_WR_BYTES))
        self._set(MESSAGE_SRQ, messages)
        self._set(INLINE_BYTES, inline_bytes)
        self._link_requests()

    def set_peer(self, peer: int, write_qp: int, message_qp: int) -> None:
        """The queue pairs (``ibv_qp``) of ``peer``."""
        place = self._peers + peer * PEER_BYTES
        ctypes.c_uint64.from_address(place).value = write_qp
        ctypes.c_uint64.from_address(place + 8).value = message_qp

    def fill_empty(self, count: int) -> None:
        """Post ``count`` receives of nothing for writes with immediates.

        Raises:
            OSError: the device refuses.
        """
        first = self._get(EMPTY_RECEIVES)
        while count > 0:
            n = min(count, POLL_BATCH)
            last = structures.RecvWr.from_address(first + (n - 1) * RECV_WR_BYTES)
            following, last.next = last.next, None
            self._post_receives(WRITE_SRQ, first)
            last.next = following
            count -= n

    def set_messages(self, base: int, nbytes: int, count: int, key: int) -> None:
        """Receive messages into ``count`` buffers of ``nbytes`` from ``base``.

        Raises:
            OSError: the device refuses.
        """
        requests = self._part(count * RECV_WR_BYTES)
        sges = self._part(count * SGE_BYTES)
        used = self._part(count * 8)
        for n in range(count):
            sge = structures.Sge.from_address(sges + n * SGE_BYTES)
            sge.addr, sge.length, sge.lkey = base + n * nbytes, nbytes, key
            request = structures.RecvWr.from_address(requests + n * RECV_WR_BYTES)
            request.wr_id, request.num_sge = MESSAGE_RECEIVE | n, 1
            request.sg_list = sges + n * SGE_BYTES
            following = requests + (n + 1) * RECV_WR_BYTES
            request.next = following if n + 1 < count else None
        self._set(MESSAGE_RECEIVES, requests)
        self._set(MESSAGE_BASE, base)
        self._set(MESSAGE_BYTES, nbytes)
        self._set(USED, used)
        self._post_receives(MESSAGE_SRQ, requests)

    @property
    def lost(self) -> int:
        """Receives that completed with an error: their connection is broken."""
        return int.from_bytes(self._words[LOST : LOST + 8].tobytes(), "little")

    def _post_receives(self, queue: int, first: int) -> None:
        """Post the receives chained from ``first`` to the queue in the word ``queue``."""
        post = _Post(self._get(POST_SRQ_RECV))
        status = post(self._get(queue), first, self._get(BAD))
        if status:
            raise OSError(abs(status), f"ibv_post_srq_recv: {os.strerror(abs(status))}")

    def _link_requests(self) -> None:
        """What never changes in the templates."""
        requests, sges = self._get(REQUESTS), self._get(SGES)
        for n in range(MAX_BURST):
            request = structures.SendWr.from_address(requests + n * SEND_WR_BYTES)
            request.sg_list = sges + n * SGE_BYTES
        empty = self._get(EMPTY_RECEIVES)
        for n in range(POLL_BATCH):
            receive = structures.RecvWr.from_address(empty + n * RECV_WR_BYTES)
            receive.wr_id = EMPTY_RECEIVE
            receive.next = empty + (n + 1) * RECV_WR_BYTES if n + 1 < POLL_BATCH else None

    def _part(self, nbytes: int) -> int:
        part = _memory(nbytes)
        self._parts.append(part)
        return int(part.ctypes.data)

    def _set(self, word: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.address + word).value = value

    def _get(self, word: int) -> int:
        return ctypes.c_uint64.from_address(self.address + word).value


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeros on cache lines of their own."""
    room = np.zeros(nbytes + 64, np.uint8)
    offset = -room.ctypes.data % 64
    return room[offset : offset + nbytes]
