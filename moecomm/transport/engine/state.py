"""The engine's own records, as byte offsets: what the loop, Python and programs share.

Every 64-bit word has one writer at a time, named behind it: the loop's thread (L), or Python under
the engine's lock (P). Words that the other side polls are stored with release and loaded with
acquire.
"""

from __future__ import annotations

from typing import Final

# ---- Engine: one, at the address that everything else gets --------------------------------------
ENGINE_BYTES: Final = 1024
COMMAND: Final = 0  # P: one of RUN, PAUSE, STOP
PHASE: Final = 8  # L: what the loop does: one of the values below
TAIL: Final = 64  # P: commands put into the ring, ever
MESSAGE_HEAD: Final = 72  # P: messages taken from their ring, ever
HEAD: Final = 128  # L: commands taken from it, ever
DONE_TAIL: Final = 192  # L: operations reported, ever
MESSAGE_TAIL: Final = 200  # L: messages put into their ring, ever
NOW: Final = 208  # L: clock in ns, as of the last tick
LAST_TICK: Final = 216  # L
TURNS: Final = 224  # L: in which there was a look at everything, ever
IDLE: Final = 232  # L: turns since anything happened; BUSY: something has, in this one
FAULT: Final = 240  # L: error number that ended the loop; 0: none
FAULT_DETAIL: Final = 248  # L
FAULT_NIC: Final = 256  # L
ABORTED_BY: Final = 264  # L: peer + 1 that gave up, as its abort word says; 0: none
ABORT_CODE: Final = 272  # L: the value of that word
NUM_NICS: Final = 320
NUM_PEERS: Final = 328
NICS: Final = 336  # address of the NIC records
NICS_END: Final = 312  # behind the last
CHANNELS: Final = 344  # of the channel records, [nic][peer]
RING: Final = 352  # of the submission ring
RING_SIZE: Final = 360  # entries; a power of two
OPERATIONS: Final = 368  # of the operation records
DONE: Final = 376  # of the ring of reported operations, u32 each
DONE_SIZE: Final = 384  # a power of two, not below the number of operations
IMM_DIRECTORY: Final = 392  # of 2^20 addresses of leaves
WAITING: Final = 400  # of the pool of commands that wait for a channel
WAITING_FREE: Final = 408  # of the stack of free places in it, u32 each
WAITING_COUNT: Final = 416  # L: free places
WAITING_KEPT: Final = 304  # of them for what may be put back: a batch of each NIC
ACTIVE: Final = 424  # of the queue of channels with waiting commands, u32 each
ACTIVE_SIZE: Final = 432  # a power of two, not below the number of channels
ACTIVE_HEAD: Final = 440  # L
ACTIVE_TAIL: Final = 448  # L
CONTROL_QUEUE: Final = 456  # of the queue of channels that owe credit writes; ACTIVE_SIZE
CONTROL_HEAD: Final = 464  # L
CONTROL_TAIL: Final = 472  # L
ABORT_WORDS: Final = 480  # of this rank's control rows of NIC 0
MESSAGES: Final = 488  # of the message ring
MESSAGES_SIZE: Final = 496  # a power of two
MESSAGE_BYTES: Final = 504  # of one entry, header included
PROGRAM: Final = 512  # P, while paused: address of the program's function; 0: none
PROGRAM_STATE: Final = 520  # P, while paused
PROGRAM_RING: Final = 528  # a second ring, whose producer runs on the loop's thread
PROGRAM_HEAD: Final = 536  # L
PROGRAM_TAIL: Final = 544  # L
TIMEOUT_NS: Final = 552  # P
SPIN_TURNS: Final = 560  # idle turns without giving up the processor
YIELD_TURNS: Final = 568  # further ones with sched_yield, before usleep
SLEEP_US: Final = 576
SCHED_YIELD: Final = 584  # addresses of C functions
USLEEP: Final = 592
CLOCK_GETTIME: Final = 600
CALLOC: Final = 608
MEMCPY: Final = 616
TIMESPEC: Final = 624  # 16 bytes for clock_gettime
POSTED: Final = 640  # L, statistics: posts accepted
REFUSED: Final = 648  # L: posts put back because a queue was full
CREDIT_WRITES: Final = 656  # L
INBOX: Final = 664  # of the ring of immediates that go to the program, u32 each; 0: none do
INBOX_SIZE: Final = 672  # entries; a power of two
INBOX_HEAD: Final = 680  # L
INBOX_TAIL: Final = 688  # L

BUSY: Final = -1

RUN: Final = 0
PAUSE: Final = 1
STOP: Final = 2

STARTING: Final = 0
RUNNING: Final = 1
PAUSED: Final = 2
ENDED: Final = 3

# ---- Commands beside WRITE and SEND -------------------------------------------------------------
EXPECT: Final = 16  # POST_IMM has come POST_NBYTES times: the operation is done
FORGET: Final = 17  # no longer waited for

# In POST_FLAGS, beside HAS_IMM.
ANYWAY: Final = 2  # also to a peer to whom an earlier post has failed: a last word to it

# ---- Operation ----------------------------------------------------------------------------------
OP_BYTES: Final = 64
OP_PENDING: Final = 0  # posts that are still to be done; 0: the operation is done
OP_CODE: Final = 8  # error number of the first failure; 0: none so far
OP_DETAIL: Final = 16
OP_PEER: Final = 24  # whom the failed post was for
OP_NIC: Final = 32
OP_FLAG: Final = 40  # address of a word to store on success; 0: none
OP_VALUE: Final = 48  # what to store there
OP_REPORT: Final = 56  # 1: report it to Python when done

# Error numbers of the engine itself; those of NICs are above 0.
TIMED_OUT: Final = -1
PEER_FAILED: Final = -2  # an earlier post to the same peer has failed
TWICE: Final = -3  # a completion of a post that is not in flight
NO_MEMORY: Final = -4
NIC_BROKEN: Final = -5  # detail: what poll returned, negated
PROGRAM_FAILED: Final = -6  # detail: what it returned, negated
MESSAGE_OVERRUN: Final = -7
FORGOTTEN: Final = -8  # an expectation that was taken back
CLOSED: Final = -9  # the engine ended first
INBOX_OVERRUN: Final = -10  # the program did not take what came

# ---- NIC ----------------------------------------------------------------------------------------
NIC_BYTES: Final = 256
NIC_POST: Final = 0
NIC_POLL: Final = 8
NIC_STATE: Final = 16
NIC_TX_DEPTH: Final = 24
NIC_PEER_DEPTH: Final = 32
NIC_RX_DEPTH: Final = 40
NIC_WINDOW: Final = 48  # arrivals that a peer may cause without asking
NIC_SLOTS: Final = 56  # of the slot records
NIC_FREE: Final = 64  # of the ring of free slots, u32 each
NIC_FREE_MASK: Final = 72  # its size less one; that is a power of two, not below tx_depth
NIC_FREE_HEAD: Final = 80
NIC_FREE_TAIL: Final = 88  # tail - head: free slots
NIC_BATCH: Final = 96  # of MAX_BURST posts to be posted together
NIC_BATCH_COUNT: Final = 104
NIC_EVENTS: Final = 112  # of MAX_BURST events
NIC_ARRIVALS: Final = 120  # taken from this NIC, ever
NIC_GRANTED: Final = 128  # sum over peers of what they may cause, ever
NIC_SCAN_AT: Final = 136  # beyond so many arrivals there is a look at what peers ask for
NIC_CONTROL_KEY: Final = 144  # local key of this rank's control memory
NIC_FULL: Final = 152  # turn in which it last refused a post
NIC_STUCK: Final = 160  # turns in which it has taken nothing, and was asked to
NIC_INDEX: Final = 168
NIC_HALF: Final = 176  # half of NIC_WINDOW, at least 1: how much news makes a credit write

# ---- Slot: what a context stands for ------------------------------------------------------------
SLOT_BYTES: Final = 16
SLOT_STATE: Final = 0  # u32: one of the values below
SLOT_OP: Final = 4  # u32
SLOT_CHANNEL: Final = 8  # u32

SLOT_FREE: Final = 0
SLOT_USER: Final = 1  # a command's; its operation waits for it
SLOT_CONTROL: Final = 2  # a credit write
SLOT_LOST: Final = 3  # its operation has been given up; waits for its event alone

# ---- Channel: one NIC to one peer ---------------------------------------------------------------
CHANNEL_BYTES: Final = 192
CH_IN_FLIGHT: Final = 0  # what every post looks at is in the first 64 bytes
CH_FIRST: Final = 8  # place + 1 of the first waiting command; 0: none
CH_SLOW: Final = 16  # 1: a post was refused again and again; one at a time
CH_CODE: Final = 24  # error number that ended it; 0: none
CH_NIC: Final = 32  # address of its NIC's record
CH_SINCE: Final = 40  # clock at the last sign of life, while anything is under way
CH_SENT: Final = 48  # arrivals that this rank has caused there, ever
CH_ANNOUNCED: Final = 56  # what the peer was last told of CH_SENT
CH_GRANTED: Final = 64  # what the peer may cause here, ever
CH_TOLD_GRANT: Final = 72  # what the peer was last told of it
CH_BUSY: Final = 80  # credit writes in flight
CH_OWES: Final = 88  # 1: is in the control queue
CH_LAST: Final = 96  # place + 1 of the last waiting command
CH_IS_ACTIVE: Final = 104  # 1: is in the queue of active channels
CH_DETAIL: Final = 112
CH_ROW: Final = 120  # of this rank's control row for the peer
CH_REMOTE_ROW: Final = 128  # of the peer's control row for this rank, as POST_REMOTE
CH_REMOTE_KEY: Final = 136

# ---- Control row: what a peer writes here, and what this rank's writes to it are taken from -----
ROW_BYTES: Final = 128
ROW_ANNOUNCED: Final = 0  # by the peer: arrivals that it has caused here
ROW_GRANTED: Final = 8  # by the peer: arrivals that this rank may cause there; NIC_WINDOW at first
ROW_ABORT: Final = 16  # by the peer: why it has given up; 0: it has not
ROW_MESSAGES: Final = 24  # by the peer: this rank's messages that it has taken
ROW_MY_ANNOUNCED: Final = 64  # sources of this rank's writes
ROW_MY_GRANTED: Final = 72
ROW_MY_ABORT: Final = 80
ROW_MY_MESSAGES: Final = 88

# ---- Leaf of the immediates' table --------------------------------------------------------------
IMM_LEAF_BITS: Final = 12
IMM_BYTES: Final = 32
IMM_ARRIVED: Final = 0  # ever
IMM_USED: Final = 8  # of them used up by expectations
IMM_WANTED: Final = 16  # arrivals beyond IMM_USED that are waited for; 0: none
IMM_OP: Final = 24  # the operation that is done then

# ---- Message: header of SEND payloads and of entries of the message ring ------------------------
MESSAGE_HEADER: Final = 16
MESSAGE_SENDER: Final = 0  # u32: rank
MESSAGE_LENGTH: Final = 4  # u32
