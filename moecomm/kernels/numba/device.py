"""What kernels in Python are made of: their arguments, the problem's numbers, the machine.

Every value in a kernel is an integer of 64 bits: addresses are in bytes, truth is 0 or 1, and a
float32 is carried by its bits. The functions here have no bodies: each is a C function of
``shim.cuh``, which a compile puts in. ``shared`` memory belongs to one thread block and is
addressed from 0; everything else by its address.
"""

from __future__ import annotations

from typing import NamedTuple


class Args(NamedTuple):
    """What a launch tells a kernel; the same fields as ``moecomm/kernels/args.py``."""

    local: int  # address of this rank's workspace
    symmetric: int  # address of this rank's part of what peers write to
    status: int  # address of three status records, which the host reads
    rank: int
    slot: int
    num_local: int  # experts here
    timeout_ns: int
    x: int  # dispatch_send: input rows
    x_stride: int  # strides are in bytes
    x_aligned: int  # rows start on 16-byte boundaries
    x_scale: int  # float32, or 0
    x_scale_row_stride: int
    x_scale_col_stride: int
    topk_idx: int  # [T, K]
    topk_idx_stride: int
    topk_idx_bytes: int  # 4 or 8 an element
    topk_weights: int  # float32 [T, K], or 0
    topk_weights_stride: int
    num_tokens: int  # address of an int32, or 0
    max_rows: int  # rows of x
    y: int  # combine_send: expert output rows
    y_stride: int
    y_aligned: int
    out: int  # combine_recv
    out_stride: int
    out_aligned: int
    accumulate: int


# ---- the problem: its numbers stand here in kernels' functions (moecomm/layout.py) -------------
NUM_RANKS = 0
REPLICAS = 0  # ranks that hold the same tokens
NUM_GROUPS = 0  # NUM_RANKS // REPLICAS: who has tokens of its own
NUM_EXPERTS = 0  # on all ranks
EXPERTS_SHARE = 0  # on each rank ...
EXPERTS_EXTRA = 0  # ... and one more on so many of the first ranks
MAX_LOCAL = 0  # experts of the rank that has most
MAX_TOKENS = 0  # of one source group
TOP_K = 0
HIDDEN = 0  # columns of a row
NUM_SCALES = 0  # of a row; 0: none
SCALE_BLOCK = 0  # columns that share a scale
SCALE_POW2 = 0
LAYOUT = 0  # one of LAYOUT_*
ALIGNMENT = 0  # of an expert's first row
ROWS_PER_RANK = 0  # one row a (token, rank) comes back, not one a (token, expert)
SLOT_ROWS = 0  # rows of recv.x that one slot has
SLOT_X_BYTES = 0
CAPACITY = 0  # rows of an expert (batched) or of all (others)
SENDER_REDUCES = 0
CAPPED = 0  # more rows than CAPACITY may come: look for that
CHECK_VALUES = 0
HEAD_WORDS = 0
PLACES = 0  # rows that may come back for one token
RECV_ROW_BYTES = 0
RECORD_BYTES = 0  # a record: meta, row, scales
RECORD_WORDS = 0
RECORD_ROW_OFF = 0
RECORD_SCALE_OFF = 0
META_BYTES = 0
COMBINE_ROW_BYTES = 0
COMBINE_STRIDE = 0
# Where regions begin in the symmetric part ...
SYM_ABORT = 0
SYM_ROLL = 0
SYM_ACK = 0
SYM_HEAD = 0
SYM_RECORD_FLAG = 0
SYM_COMBINE_FLAG = 0
SYM_RECORD = 0
SYM_COMBINE_ROW = 0
# ... and in the workspace.
LOC_PEERS = 0
LOC_EPOCH = 0
LOC_CLAIM = 0
LOC_OVERFLOWED = 0
LOC_STAT_SENT = 0
LOC_STAT_RECV = 0
LOC_STAT_ROWS = 0
LOC_STAT_EXPERT = 0
LOC_STAT_WAIT_NS = 0
LOC_NUM_TOKENS = 0
LOC_NUM_RECORDS = 0
LOC_ROUTE = 0
LOC_NUM_DEST = 0
LOC_WEIGHT = 0
LOC_META = 0
LOC_ROW_OF = 0
LOC_COUNTS = 0
LOC_OFFSETS = 0
LOC_NUM_ROWS = 0
LOC_SRC_RANK = 0
LOC_SRC_TOKEN = 0
LOC_ROW_EXPERT = 0
LOC_ROW_WEIGHT = 0
LOC_X_SCALE = 0
LOC_X = 0
# The launch, and element types as numbers.
NUM_THREADS = 0  # of a block
NUM_WARPS = 0
INPUT_DTYPE = 0  # of x
WIRE_DTYPE = 0
COMBINE_DTYPE = 0


# ---- who am I ----------------------------------------------------------------------------------
def thread_id() -> int:
    """Number in the block."""


def warp_id() -> int:
    """Number of the warp in the block."""


def lane_id() -> int:
    """Number in the warp, 0 to 31."""


def block_id() -> int:
    """Number of the block in the launch."""


def num_blocks() -> int:
    """Blocks of the launch. All of them run at the same time."""


# ---- meeting others ----------------------------------------------------------------------------
def sync_block() -> int:
    """Wait for all threads of the block. What they wrote before is there for all afterwards."""


def all_threads(yes: bool) -> bool:
    """``sync_block``; whether ``yes`` held for all threads."""


def any_thread(yes: bool) -> bool:
    """``sync_block``; whether ``yes`` held for any thread."""


def sync_warp() -> int:
    """Wait for all lanes of the warp. What they wrote before is there for all afterwards."""


def all_lanes(yes: bool) -> bool:
    """Whether ``yes`` holds for all lanes. This and what follows orders no memory."""


def any_lane(yes: bool) -> bool:
    """Whether ``yes`` holds for any lane."""


def ballot(yes: bool) -> int:
    """Bit i says whether ``yes`` holds for lane i."""


def match(key: int) -> int:
    """Bit i says whether lane i has the same ``key`` (its low 32 bits)."""


def shuffle(value: int, lane: int) -> int:
    """The ``value`` (32 bits, with sign) of another lane."""


def shuffle_up(value: int, distance: int) -> int:
    """The ``value`` of the lane so far below; the own where there is none."""


def shuffle_xor(value: int, mask: int) -> int:
    """The ``value`` of the lane whose number differs in the bits of ``mask``."""


def popcount(bits: int) -> int:
    """How many of the low 32 bits are set."""


def first_bit(bits: int) -> int:
    """Number of the lowest set bit of 32; -1 where there is none."""


# ---- memory that others may touch --------------------------------------------------------------
def load_u32(address: int) -> int:
    """4 bytes, without sign."""


def load_i32(address: int) -> int:
    """4 bytes, with sign."""


def load_i64(address: int) -> int:
    """8 bytes."""


def store_i32(address: int, value: int) -> int:
    """The low 4 bytes of ``value``."""


def store_i64(address: int, value: int) -> int:
    """8 bytes."""


def load_acquire(flag: int) -> int:
    """A flag (8 bytes). What its writer did before it released this value has happened."""


def load_relaxed(flag: int) -> int:
    """A flag, of which nothing else follows."""


def store_release(flag: int, value: int) -> int:
    """Set a flag once all that this thread did, or was told of, has happened."""


def store_relaxed(flag: int, value: int) -> int:
    """Set a flag at any time."""


def compare_and_swap(flag: int, old: int, value: int) -> int:
    """Set the flag if it holds ``old``; return what it held."""


def atomic_add(address: int, value: int) -> int:
    """Add to 8 bytes; return what was there."""


# ---- shared memory of the block ----------------------------------------------------------------
def shared_u32(offset: int) -> int:
    """4 bytes, without sign."""


def shared_i32(offset: int) -> int:
    """4 bytes, with sign."""


def shared_i64(offset: int) -> int:
    """8 bytes."""


def put_shared_i32(offset: int, value: int) -> int:
    """Store the low 4 bytes."""


def put_shared_i64(offset: int, value: int) -> int:
    """Store 8 bytes."""


def add_shared(offset: int, value: int) -> int:
    """Add to 4 bytes, atomically; return what was there."""


def min_shared(offset: int, value: int) -> int:
    """Lower 4 bytes (no sign) to ``value``, atomically; return what was there."""


# ---- time, waiting, launches -------------------------------------------------------------------
def time_ns() -> int:
    """A clock of nanoseconds."""


def pause(spins: int) -> bool:
    """One turn of a waiting loop, the ``spins``-th; whether to look at clock and abort word now."""


def wait_for_earlier_kernels() -> int:
    """Wait until every earlier kernel of the stream has ended."""


def let_next_kernel_start() -> int:
    """The next kernel of the stream may begin beside this one."""


def note_epoch(epoch: int) -> int:
    """For the emulator's checks: what this thread reads from peers must be of ``epoch``."""


def note_wait(flag: int, value: int) -> int:
    """For the emulator's reports: this thread waits for ``value`` in ``flag``."""


def quotient(a: int, b: int) -> int:
    """``a // b`` of numbers below 2**32: on a GPU, ``//`` calls a function of 100 instructions
    unless ``b`` is a number of the problem."""


def add_floats(a: int, b: int) -> int:
    """The sum of two float32, by their bits."""


# ---- rows: all threads of the block call these together ----------------------------------------
# A row has ``columns`` elements of ``dtype``. It is moved 16 bytes at a time where it starts on a
# 16-byte boundary (``aligned``), else one element at a time. A *list* is an offset in shared
# memory, where ``num`` values stand one after the other: addresses have 8 bytes, weights 4.
def copy_row(to: int, to_aligned: int, row: int, aligned: int, columns: int, dtype: int) -> int:
    """Copy ``row`` to address ``to``."""


def spread_row(
    to: int, num: int, offset: int, to_aligned: int,
    row: int, aligned: int, columns: int, dtype: int,
) -> int:  # fmt: skip
    """Copy ``row`` to ``offset`` behind each address of the list ``to``."""


def cast_row(
    to: int, num: int, row_offset: int, scale_offset: int,
    row: int, aligned: int, dtype: int, columns: int, scale_block: int, pow2: int,
) -> int:  # fmt: skip
    """As ``spread_row``, cast to fp8; each block's scale goes to ``scale_offset``."""


def clear_row(row: int, aligned: int, columns: int, dtype: int) -> int:
    """Fill with zeros."""


def sum_rows(
    to: int, to_aligned: int, rows: int, weights: int, num: int,
    aligned: int, columns: int, dtype: int, accumulate: int,
) -> int:  # fmt: skip
    """``to`` = sum of weight * row over the lists, in order, in float32, rounded once.

    Products and sums round one by one. ``accumulate``: begin with what stands in ``to``.
    """
