"""The mover's own records, as byte offsets. All words have 64 bits.

Behind each word is who writes it: the loop's thread (L), or Python (P); without a letter: Python,
before the loop first sees it.
"""

from __future__ import annotations

from typing import Final

# ---- One, at the address that the program gets --------------------------------------------------
BYTES: Final = 768
ENGINE: Final = 0  # address of the engine's records
RANK: Final = 8
NUM_RANKS: Final = 16
NUM_NICS: Final = 24
NUM_SLOTS: Final = 32
REMOTES: Final = 40  # address of the list of remote ranks
NUM_REMOTES: Final = 48
SLOTS: Final = 56  # address of the slot records
PAIRS: Final = 64  # of the pair records, [slot][rank]
PEERS: Final = 72  # of the peer records, [rank][nic]
LEFT: Final = 80  # of a word a rank, L: 1: it has said good-bye
NIC_KEYS: Final = 88  # of a word a NIC: local key of ``bulk``
FLAG_KEYS: Final = 96  # the same of ``flags``
FIRST_OP: Final = 104  # operations of the engine: OPS_A_SLOT a slot, then ABORT, PING, LEAVE
PING_NS: Final = 112  # silence after which a rank that waits asks whether the others are there

# Addresses in ``flags``, and numbers of ``RemoteAreas``.
DOOR: Final = 128
PLAN: Final = 136
ARRIVED: Final = 144
ABORT_OUT: Final = 152
ABORT_IN: Final = 160
DOOR_BYTES: Final = 168  # of one slot
PLAN_BYTES: Final = 176  # of one slot and rank
CHANNELS: Final = 184
PRIVATE: Final = 192
HEAD_BYTES: Final = 200
RECORD_BYTES: Final = 208
ROW_BYTES: Final = 216
STAGED_RECORDS: Final = 224
SOURCE_RECORDS: Final = 232
STAGED_ROWS: Final = 240
LANDING_ROWS: Final = 248
BULK: Final = 256  # address
OUT_HEAD: Final = 264  # offsets in ``bulk``
IN_HEAD: Final = 272
OUT_RECORD: Final = 280
IN_RECORD: Final = 288
OUT_ROW: Final = 296
IN_ROW: Final = 304
HEAD_SHARE: Final = 312  # offset in a head: records from this very replica
LANDED: Final = 320  # address in ``flags``
PATIENCE_NS: Final = 328  # for which a stream waits for ``landed``

TOLD: Final = 384  # L: 1: the others have been told that somebody gave up
CULPRIT: Final = 392  # L: rank + 1 to whom a write failed; this rank: the engine itself
CULPRIT_CODE: Final = 400  # L: the engine's error number
SEEN: Final = 408  # L: arrivals, ever
LAST_SEEN: Final = 416  # L: SEEN at the last look at the clock
LAST_LOOK: Final = 424  # L: when that was
STRANGE: Final = 432  # L: immediates that no mover sends
PINGS: Final = 440  # L
CLOSING: Final = 448  # P: 1: serve what has been rung, say good-bye, and stop; L: 2: is saying so
CLOSED: Final = 456  # L: 1: all that is done
ABORT_WORD: Final = 464  # L: what the others were told
WAKE: Final = 472  # P: 1: no stream is to wait any more
WRITES: Final = 512  # L: statistics, a word for each kind of write
NBYTES: Final = 576  # L: the same, bytes
MOVE_NS: Final = 640  # L: the same, from the first of a door's posts to the end of the last

# ---- Slot ---------------------------------------------------------------------------------------
SLOT_BYTES: Final = 192
SLOT_EPOCH: Final = 0  # that it serves, from 1
SLOT_STAGE: Final = 8  # the door that it waits for; RETURN: rows or acknowledgement
SLOT_OPEN: Final = 16  # bit k: the operation of door k is not known to be done
SLOT_POSTED: Final = 24  # when door k was posted, a word each
SLOT_HALVES: Final = 64  # a half record for each receiving half

HALF_BYTES: Final = 48
HALF_EPOCH: Final = 0  # of which HALF_COUNT remote ranks have sent all that this half takes
HALF_COUNT: Final = 8
HALF_DONE: Final = 16  # the last epoch of which all have
HALF_TICKET: Final = 24  # the last one seen
HALF_SINCE: Final = 32  # when that was

RETURN: Final = 3
OPS_A_SLOT: Final = 5
OP_ABORT: Final = 0  # behind those of the slots
OP_PING: Final = 1
OP_LEAVE: Final = 2
OTHER_OPS: Final = 3

# ---- Pair: what a slot's plan said of a rank at door HEAD; what has come from it -----------------
PAIR_BYTES: Final = 32
PAIR_FIRST: Final = 0
PAIR_COUNT: Final = 8
PAIR_SENT: Final = 16  # the last epoch of which the rank has sent all, a word for each half

# ---- Peer: one rank by one NIC ------------------------------------------------------------------
PEER_BYTES: Final = 64
PEER_BULK: Final = 0  # of ``bulk`` there, as POST_REMOTE
PEER_BULK_KEY: Final = 8
PEER_ABORT_IN: Final = 16  # of the word there, as POST_REMOTE
PEER_FLAG_KEY: Final = 24
PEER_NOTHING: Final = 32  # target of writes of nothing
PEER_NOTHING_KEY: Final = 40
PEER_SOURCE: Final = 48  # source of writes of nothing
PEER_SOURCE_KEY: Final = 56
