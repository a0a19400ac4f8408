"""Routing at the source: which ranks a token goes to, which place it takes there, and the numbers
that tell every rank what to expect. Used by dispatch_send.

Shared memory: first the plan of the token in hand (lists, a word or two for each destination or
slot of top-k), then tables of the ranks and experts.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.waits import *

# The plan. By destination, in ascending order of ranks:
RECORDS = 0  # [32] address of the record there
FLAGS = 256  # [32] address of its flag
RANKS = 512  # [32]
# by slot of top-k:
EXPERTS = 640  # [32] global number, or NO_EXPERT: dropped, or named before in this row
INDEXES = 768  # [32] place among the group's rows of that expert
WEIGHTS = 896  # [32] float32
# and
NUM_DEST = 1024  # how many destinations
TABLES = 1032


def peer(rank: int) -> int:
    """Where the symmetric part of each rank begins."""
    return TABLES + 8 * rank


def expert_count(expert: int) -> int:
    """Tokens seen so far that name the expert."""
    return TABLES + 8 * NUM_RANKS + 4 * expert


def rank_count(rank: int) -> int:
    """Tokens seen so far that go to the rank."""
    return TABLES + 8 * NUM_RANKS + 4 * NUM_EXPERTS + 4 * rank


# ---- what the caller gave ----------------------------------------------------------------------
def token_count(a: Args) -> int:
    if a.num_tokens == 0:
        return a.max_rows
    return max(0, min(load_i32(a.num_tokens), a.max_rows))


def raw_expert(a: Args, t: int, k: int) -> int:
    row = a.topk_idx + t * a.topk_idx_stride
    if a.topk_idx_bytes == 8:
        return load_i64(row + 8 * k)
    return load_i32(row + 4 * k)


def expert_of(a: Args, t: int, k: int) -> int:
    expert = raw_expert(a, t, k)
    return expert if 0 <= expert < NUM_EXPERTS else NO_EXPERT


def given_weight(a: Args, t: int, k: int) -> int:
    """The float32 weight of slot ``k``; 0 where none were given."""
    if a.topk_weights == 0:
        return 0
    return load_u32(a.topk_weights + t * a.topk_weights_stride + 4 * k)


# ---- beginning ---------------------------------------------------------------------------------
def begin_send(a: Args) -> int:
    """Fill the tables and wait until the slot may be written. The epoch; -1: the group gave up."""
    clear_counts()
    for r in range(thread_id(), NUM_RANKS, NUM_THREADS):
        put_shared_i64(peer(r), peer_base(a, r))
    wait_for_earlier_kernels()
    last = load_i64(read_word(a))
    abort = load_abort(a)
    epoch = last + 1
    note_epoch(epoch)
    ok = True
    for r in range(thread_id(), NUM_RANKS, NUM_THREADS):
        ok = ok and ack_arrived(a, r, last, epoch)  # it has read what this slot sent it last
    ok = all_threads(ok and (thread_id() > 0 or not aborted(a, abort, epoch)))
    let_next_kernel_start()
    return epoch if ok else -1


def ack_arrived(a: Args, reader: int, last: int, epoch: int) -> bool:
    flag = ack_flag(a, a.symmetric, reader)
    return wait_for_flag(a, flag, last, epoch, DISPATCH_SEND, reader, 1)


def clear_counts() -> None:
    for i in range(thread_id(), NUM_EXPERTS + NUM_RANKS, NUM_THREADS):
        put_shared_i32(expert_count(i), 0)


# ---- counting ----------------------------------------------------------------------------------
def count_tokens(a: Args, last: int) -> None:
    """Add tokens [0, last) to the counts, 32 // TOP_K tokens a warp and step."""
    per_warp = 32 // TOP_K
    sub, k = lane_id() // TOP_K, lane_id() % TOP_K
    for first in range(warp_id() * per_warp, last, NUM_WARPS * per_warp):
        t = first + sub
        expert = expert_of(a, t, k) if sub < per_warp and t < last else NO_EXPERT
        named = expert != NO_EXPERT
        rank = expert_rank(expert) if named else 0
        # An expert, or a rank, that a token names twice counts once.
        if is_first(same_key(named, sub << 16 | expert)) and named:
            add_shared(expert_count(expert), 1)
        if is_first(same_key(named, sub << 16 | rank)) and named:
            add_shared(rank_count(rank), 1)


# ---- one token ---------------------------------------------------------------------------------
def plan_token(a: Args, t: int) -> None:
    """Warp 0, a lane a slot of top-k: where does token ``t`` go? Advances the counts, and keeps
    the routing for the combine stages."""
    k = lane_id()
    sync_warp()  # no lane still reads the plan of the token before
    expert = expert_of(a, t, k) if k < TOP_K else NO_EXPERT
    named = expert != NO_EXPERT
    twins = same_key(named, expert)
    first = named and is_first(twins)
    rank = expert_rank(expert) if named else 0
    opens_rank = is_first(same_key(named, rank)) and named
    openers = ballot(opens_rank)
    place = lower_ranks(openers, rank)
    weight = summed_weight(given_weight(a, t, k) if named else 0, twins)

    if opens_rank:
        i = add_shared(rank_count(rank), 1)
        base, group = shared_i64(peer(rank)), a.rank // REPLICAS
        put_shared_i32(RANKS + 4 * place, rank)
        put_shared_i64(RECORDS + 8 * place, record_at(a, base, group, i))
        put_shared_i64(FLAGS + 8 * place, record_flag(a, base, group, i))
    put_shared_i32(EXPERTS + 4 * k, expert if first else NO_EXPERT)
    put_shared_i32(WEIGHTS + 4 * k, weight)
    if first:
        put_shared_i32(INDEXES + 4 * k, add_shared(expert_count(expert), 1))
    if k == 0:
        put_shared_i32(NUM_DEST, popcount(openers))

    token = a.slot * MAX_TOKENS + t
    if k < TOP_K:
        route = first_bit(twins) << 16 | expert if named else NO_EXPERT
        store_i32(a.local + LOC_ROUTE + 4 * (token * TOP_K + k), route)
        store_i32(a.local + LOC_WEIGHT + 4 * (token * TOP_K + k), weight)
    if k == 0:
        store_i32(a.local + LOC_NUM_DEST + 4 * token, popcount(openers))


def lower_ranks(openers: int, rank: int) -> int:
    """How many of the lanes in ``openers`` have a lower ``rank`` than this one."""
    count = 0
    for k in range(TOP_K):
        other = shuffle(rank, k)
        if openers >> k & 1 and other < rank:
            count += 1
    return count


def summed_weight(own: int, twins: int) -> int:
    """The sum of the weights of all slots in ``twins`` (one expert, named again), in order."""
    total = 0
    for k in range(TOP_K):
        weight = shuffle(own, k)
        if twins >> k & 1:
            total = add_floats(total, weight)
    return total


def meta_word(a: Args, t: int, d: int, i: int) -> int:
    """Word ``i`` of the meta for destination ``d``."""
    if i == META_TOKEN:
        return t
    if i == META_PLACE:
        return d
    if i == META_GROUP:
        return a.rank // REPLICAS
    if i < META_EXPERT or i >= META_EXPERT + 3 * TOP_K:
        return 0
    what, k = (i - META_EXPERT) // TOP_K, (i - META_EXPERT) % TOP_K
    expert, rank = shared_i32(EXPERTS + 4 * k), shared_i32(RANKS + 4 * d)
    here = expert != NO_EXPERT and expert_rank(expert) == rank
    if what == 0:
        return expert - rank_first_expert(rank) if here else NO_EXPERT
    if not here:
        return 0
    return shared_i32(INDEXES + 4 * k) if what == 1 else shared_i32(WEIGHTS + 4 * k)


# ---- block 0: numbers for everybody ------------------------------------------------------------
def announce(a: Args, tokens: int, epoch: int) -> None:
    """Count everything and tell every rank. The counts are clear again afterwards."""
    count_tokens(a, tokens)
    sync_block()
    send_heads(a, epoch)
    if CHECK_VALUES:
        check_values(a, tokens, epoch)
    if thread_id() == 0:
        store_i32(a.local + LOC_NUM_TOKENS + 4 * a.slot, tokens)
        store_i64(sent_word(a), epoch)
    sync_block()
    clear_counts()
    sync_block()


def send_heads(a: Args, epoch: int) -> None:
    """To each rank: how many records, how many rows of each of its experts. The words carry their
    epoch; the first is released, since it also says that older combine rows have been read."""
    for i in range(thread_id(), NUM_RANKS * HEAD_WORDS, NUM_THREADS):
        dest, word = i // HEAD_WORDS, i % HEAD_WORDS
        flag = head_word(a, shared_i64(peer(dest)), a.rank, word)
        value = epoch << 32 | head_count(dest, word)
        if word == 0:
            store_release(flag, value)
        else:
            store_relaxed(flag, value)
    for r in range(thread_id(), NUM_RANKS, NUM_THREADS):
        atomic_add(a.local + LOC_STAT_SENT + 8 * r, shared_u32(rank_count(r)))


def head_count(dest: int, word: int) -> int:
    if word == 0:
        return shared_u32(rank_count(dest))
    if word <= MAX_LOCAL:
        e = word - 1
        if e >= rank_num_experts(dest):
            return 0
        return shared_u32(expert_count(rank_first_expert(dest) + e))
    i = word - 1 - MAX_LOCAL  # with a cap: everybody's numbers
    return shared_u32(rank_count(i) if LAYOUT == LAYOUT_RANK else expert_count(i))


def check_values(a: Args, tokens: int, epoch: int) -> None:
    """Report one value that makes no sense; it has been left out of everything."""
    if a.num_tokens != 0 and thread_id() == 0:
        n = load_i32(a.num_tokens)
        if (n < 0 or n > a.max_rows) and claim_status(a, STATUS_VALUE, epoch):
            report(a, STATUS_VALUE, BAD_NUM_TOKENS, DISPATCH_SEND, a.rank, 0, epoch, a.max_rows, n)
    for i in range(thread_id(), tokens * TOP_K, NUM_THREADS):
        expert = raw_expert(a, i // TOP_K, i % TOP_K)
        if -1 <= expert < NUM_EXPERTS:
            continue
        if claim_status(a, STATUS_VALUE, epoch):
            report(
                a, STATUS_VALUE, BAD_EXPERT, DISPATCH_SEND, a.rank, i, epoch, NUM_EXPERTS, expert
            )
        return
