"""The records that the hot loop, providers and programs exchange, as byte offsets.

All are plain memory, little-endian, naturally aligned. A field of 64 bits is read as ``int64``.
"""

from __future__ import annotations

from typing import Final

# ---- Post: one work request. A command in a submission ring is the same record. -----------------
POST_BYTES: Final = 64
POST_PEER: Final = 0  # u32: place of the peer in what Nic.connect was given
POST_NIC: Final = 4  # u16: which NIC; a provider need not look
POST_KIND: Final = 6  # u8: one of the kinds below
POST_FLAGS: Final = 7  # u8: HAS_IMM
POST_IMM: Final = 8  # u32
POST_CONTEXT: Final = 12  # u32: comes back in the event (in a ring: the operation)
POST_LOCAL: Final = 16  # u64: address of the payload; valid memory also where nbytes is 0
POST_LOCAL_KEY: Final = 24  # u64: Registration.local_key
POST_NBYTES: Final = 32  # u64
POST_REMOTE: Final = 40  # u64: Registration.remote_base of the target plus an offset
POST_REMOTE_KEY: Final = 48  # u64: Registration.remote_key of the target
POST_SEQUENCE: Final = 56  # u64: of the ring; nothing to a provider

WRITE: Final = 1  # one-sided; with HAS_IMM the target gets ARRIVED
SEND: Final = 2  # two-sided; the target gets RECEIVED; POST_REMOTE and POST_REMOTE_KEY unused

HAS_IMM: Final = 1

# ---- Event: one completion ----------------------------------------------------------------------
EVENT_BYTES: Final = 32
EVENT_KIND: Final = 0  # u32: one of the kinds below
EVENT_IMM: Final = 4  # u32: ARRIVED
EVENT_CONTEXT: Final = 8  # u64: SENT, FAILED: POST_CONTEXT; RECEIVED: address of the bytes
EVENT_CODE: Final = 16  # i64: FAILED: the library's positive error number
EVENT_DETAIL: Final = 24  # u64: FAILED: the device's own number; RECEIVED: number of bytes

SENT: Final = 1  # a post is done; its payload may be overwritten
FAILED: Final = 2  # a post failed; the peer gets no more
ARRIVED: Final = 3  # a write with an immediate has landed here
RECEIVED: Final = 4  # a message; its bytes stay until the next poll of this NIC
