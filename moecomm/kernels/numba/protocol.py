"""What all stages share: where things lie, experts, lanes, reports.

A handle owns a *slot*. Its *epoch* grows by one with each use; flags hold epochs, so nothing is
ever reset. ``docs/protocol.md`` says which flag means what, and why nothing is overwritten early.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *

LAYOUT_BATCHED, LAYOUT_GROUPED, LAYOUT_RANK = 0, 1, 2
DISPATCH_SEND, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV = 0, 1, 2, 3  # phases, in reports
STATUS_FAILURE, STATUS_VALUE, STATUS_OVERFLOW = 0, 1, 2  # which record the host reads
CLAIM_ANSWERED = 3  # beside the claims of these three: see waits.py
TIMEOUT, ABORTED, BAD_EXPERT, BAD_NUM_TOKENS, OVERFLOW = 1, 2, 3, 4, 5  # what a record says

NO_EXPERT = -1
LOW_HALF = 0xFFFFFFFF

# ---- a record's meta, in words of 4 bytes; the last three have one word a slot of top-k --------
META_TOKEN = 0  # number of the token at its source
META_PLACE = 1  # where its per-rank result goes
META_GROUP = 2  # source group
META_EXPERT = 4  # local expert, or NO_EXPERT; then, TOP_K words later, INDEX, then WEIGHT


# ---- addresses ---------------------------------------------------------------------------------
def peer_base(a: Args, rank: int) -> int:
    """Where the symmetric part of ``rank`` begins."""
    return load_i64(a.local + LOC_PEERS + 8 * rank)


def ack_flag(a: Args, base: int, reader: int) -> int:
    """``reader`` has read all that we sent it."""
    return base + SYM_ACK + 8 * (a.slot * NUM_RANKS + reader)


def head_word(a: Args, base: int, source: int, word: int) -> int:
    """A number that ``source`` tells before its records."""
    return base + SYM_HEAD + 8 * ((a.slot * NUM_RANKS + source) * HEAD_WORDS + word)


def record_flag(a: Args, base: int, group: int, i: int) -> int:
    """Record ``i`` of ``group`` is there."""
    return base + SYM_RECORD_FLAG + 8 * ((a.slot * NUM_GROUPS + group) * MAX_TOKENS + i)


def record_at(a: Args, base: int, group: int, i: int) -> int:
    number = (a.slot * NUM_GROUPS + group) * MAX_TOKENS + i
    return base + SYM_RECORD + number * RECORD_BYTES


def combine_flag(a: Args, base: int, token: int, place: int) -> int:
    """The row at this place of the token is there."""
    return base + SYM_COMBINE_FLAG + 8 * ((a.slot * MAX_TOKENS + token) * PLACES + place)


def combine_row(a: Args, base: int, token: int, place: int) -> int:
    number = (a.slot * MAX_TOKENS + token) * PLACES + place
    return base + SYM_COMBINE_ROW + number * COMBINE_STRIDE


def sent_word(a: Args) -> int:
    """The epoch of this use of the slot: dispatch_send writes it, the combine stages read it."""
    return a.local + LOC_EPOCH + 16 * a.slot


def read_word(a: Args) -> int:
    """The last epoch whose records have been read: combine_send and release write it, the
    dispatch stages count on from it. No stage reads the word that it writes."""
    return a.local + LOC_EPOCH + 16 * a.slot + 8


# ---- experts -----------------------------------------------------------------------------------
def expert_rank(expert: int) -> int:
    """The first EXPERTS_EXTRA ranks host one expert more than the others."""
    boundary = EXPERTS_EXTRA * (EXPERTS_SHARE + 1)
    if expert < boundary:
        return expert // (EXPERTS_SHARE + 1)
    return EXPERTS_EXTRA + (expert - boundary) // max(EXPERTS_SHARE, 1)


def rank_first_expert(rank: int) -> int:
    return rank * EXPERTS_SHARE + min(rank, EXPERTS_EXTRA)


def rank_num_experts(rank: int) -> int:
    return EXPERTS_SHARE + (1 if rank < EXPERTS_EXTRA else 0)


# ---- lanes -------------------------------------------------------------------------------------
def same_key(has_key: bool, key: int) -> int:
    """Lanes with this lane's key, as bits; a lane without a key is alone."""
    return match(key if has_key else 1 << 31 | lane_id())


def is_first(lanes: int) -> bool:
    """Whether this lane is the lowest of ``lanes``."""
    return first_bit(lanes) == lane_id()


# ---- reports -----------------------------------------------------------------------------------
def claim_status(a: Args, which: int, epoch: int) -> bool:
    """Whether this thread may fill the record: it is the first to put this use into the claim."""
    claim = a.local + LOC_CLAIM + 8 * which
    mine = epoch << 16 | a.slot << 1 | 1
    before = load_relaxed(claim)
    return before != mine and compare_and_swap(claim, before, mine) == before


def report(
    a: Args, which: int, code: int, phase: int, rank: int, peer: int,
    epoch: int, expected: int, seen: int,
) -> None:  # fmt: skip
    """Tell the host; ``code`` comes last, since the host looks at it first."""
    words = a.status + 64 * which
    store_relaxed(words + 8, phase)
    store_relaxed(words + 16, rank)
    store_relaxed(words + 24, peer)
    store_relaxed(words + 32, epoch)
    store_relaxed(words + 40, expected)
    store_relaxed(words + 48, seen)
    store_relaxed(words + 56, a.slot)
    store_release(words, code)


def acknowledge(a: Args, epoch: int) -> None:
    """The first stage after dispatch_recv: this rank has read its records of ``epoch``, and their
    senders may write new ones. The last warp of block 0 says so; the others go on."""
    if block_id() > 0 or warp_id() != NUM_WARPS - 1:
        return
    if lane_id() == 0:
        store_i64(read_word(a), epoch)
    for r in range(lane_id(), NUM_RANKS, 32):
        store_release(ack_flag(a, peer_base(a, r), a.rank), epoch)
