"""Placement at the receiver: where each source group's rows of each local expert go. Used by
dispatch_recv.

Shared memory: the plan of the record in hand, then tables (4 bytes an entry) that every block
works out for itself from the heads.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.waits import *

# The plan of one record:
ROW_AT = 0  # [32] addresses of the rows of recv.x that get a copy
ROWS = 256  # [32] their numbers
NUM_COPIES = 384
PLAN_END = 392


# ---- tables ------------------------------------------------------------------------------------
def rows_before(a: Args, group: int, expert: int) -> int:
    """First row of (group, local expert) within the expert."""
    return PLAN_END + 4 * (group * a.num_local + expert)


def expert_total(a: Args, expert: int) -> int:
    """Rows of the expert."""
    return rows_before(a, NUM_GROUPS, expert)


def expert_start(a: Args, expert: int) -> int:
    """[num_local + 1] grouped: first row of the expert."""
    return rows_before(a, NUM_GROUPS + 1, expert)


def group_start(a: Args, group: int) -> int:
    """[NUM_GROUPS + 1] records of earlier groups."""
    return rows_before(a, NUM_GROUPS + 2, 1 + group)


def lowest_unit(a: Args) -> int:
    """A word that all threads look for an overflow with."""
    return group_start(a, NUM_GROUPS + 1)


def prefix_sums(values: int, n: int, align: int) -> None:
    """One warp, in place: values[i] = sum of values[:i], each rounded up; values[n] = all."""
    total = 0
    for first in range(0, n, 32):
        i = first + lane_id()
        own = 0
        if i < n:
            own = (shared_u32(values + 4 * i) + align - 1) // align * align
        up_to = own
        step = 1
        while step < 32:
            below = shuffle_up(up_to, step)
            if lane_id() >= step:
                up_to += below
            step *= 2
        if i < n:
            put_shared_i32(values + 4 * i, total + up_to - own)
        total += shuffle(up_to, 31)
    if lane_id() == 0:
        put_shared_i32(values + 4 * n, total)
    sync_warp()


def warp_sum(value: int) -> int:
    step = 16
    while step > 0:
        value += shuffle_xor(value, step)
        step //= 2
    return value


# ---- heads -------------------------------------------------------------------------------------
def place_rows(a: Args, epoch: int) -> bool:
    """Wait for every head and work out where rows go. True: this block is to receive rows. Block 0
    reports the counts; the others receive, or it does both if it is alone."""
    # First words first: all blocks polling all words would slow down what they wait for.
    if not heads_arrived(a, 0, 1, epoch):
        return False
    if needs_counts() and not heads_arrived(a, 1, HEAD_WORDS - 1, epoch):
        return False
    if CAPPED and overflows(a, epoch):
        return False
    add_up(a)
    if block_id() == 0:
        write_counts(a)
    if LAYOUT == LAYOUT_GROUPED:
        write_pads(a)
    return block_id() > 0 or num_blocks() == 1


def needs_counts() -> bool:
    """In the rank layout only block 0, which reports counts, needs more than the first words;
    with a cap every block looks for an overflow in all of them."""
    return LAYOUT != LAYOUT_RANK or CAPPED != 0 or block_id() == 0


def heads_arrived(a: Args, first: int, num_words: int, epoch: int) -> bool:
    """Wait for so many words of every head and keep their counts. Replicas of a group all say the
    same; each must have spoken, since that also frees its combine rows."""
    ok = True
    for i in range(thread_id(), NUM_RANKS * num_words, NUM_THREADS):
        source, word = i // num_words, first + i % num_words
        flag = head_word(a, a.symmetric, source, word)
        count = wait_for_count(a, flag, epoch, DISPATCH_RECV, source)
        if count < 0:
            ok = False
            break
        if source % REPLICAS == 0 and word <= a.num_local:
            put_shared_i32(count_table(a, source // REPLICAS, word), count)
    return all_threads(ok)


def count_table(a: Args, group: int, word: int) -> int:
    """Where word ``word`` of a group's head is kept."""
    return group_start(a, group) if word == 0 else rows_before(a, group, word - 1)


def add_up(a: Args) -> None:
    """Counts become beginnings."""
    if needs_counts():
        for e in range(thread_id(), a.num_local, NUM_THREADS):
            rows = 0
            for g in range(NUM_GROUPS):
                count = shared_u32(rows_before(a, g, e))
                put_shared_i32(rows_before(a, g, e), rows)
                rows += count
            put_shared_i32(expert_total(a, e), rows)
            put_shared_i32(expert_start(a, e), rows)
    if warp_id() == 0:
        prefix_sums(group_start(a, 0), NUM_GROUPS, 1)
    sync_block()
    if LAYOUT == LAYOUT_GROUPED:
        if warp_id() == 0:
            prefix_sums(expert_start(a, 0), a.num_local, ALIGNMENT)
        sync_block()


# ---- a cap: does anybody, anywhere, get more than it has room for? -----------------------------
def overflows(a: Args, epoch: int) -> bool:
    """Look for the lowest unit (expert: batched; else rank) over capacity, found alike on every
    rank. Block 0 of each rank reports it."""
    units = NUM_EXPERTS if LAYOUT == LAYOUT_BATCHED else NUM_RANKS
    if thread_id() == 0:
        put_shared_i32(lowest_unit(a), units)
    sync_block()
    for i in range(thread_id(), units, NUM_THREADS):
        if rows_needed(a, i) > CAPACITY:
            min_shared(lowest_unit(a), i)
    sync_block()
    unit = shared_u32(lowest_unit(a))
    sync_block()
    if unit == units:
        return False
    if block_id() == 0 and thread_id() == 0:
        store_i64(a.local + LOC_OVERFLOWED + 8 * a.slot, epoch)
        needed = rows_needed(a, unit)
        report(a, STATUS_OVERFLOW, OVERFLOW, DISPATCH_RECV, a.rank, unit, epoch, needed, CAPACITY)
    return True


def rows_needed(a: Args, unit: int) -> int:
    if LAYOUT != LAYOUT_GROUPED:
        return total_over_groups(a, unit)
    rows = 0
    first = rank_first_expert(unit)
    for e in range(rank_num_experts(unit)):
        rows += (total_over_groups(a, first + e) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return rows


def total_over_groups(a: Args, i: int) -> int:
    """What all groups said in the words that tell everybody's numbers."""
    total = 0
    for g in range(NUM_GROUPS):
        flag = head_word(a, a.symmetric, g * REPLICAS, 1 + MAX_LOCAL + i)
        total += load_relaxed(flag) & LOW_HALF
    return total


# ---- block 0: what the caller reads beside the rows --------------------------------------------
def write_counts(a: Args) -> None:
    counts = a.local + LOC_COUNTS + 4 * a.slot * MAX_LOCAL
    offsets = a.local + LOC_OFFSETS + 4 * a.slot * (MAX_LOCAL + 1)
    for e in range(thread_id(), a.num_local, NUM_THREADS):
        n = shared_u32(expert_total(a, e))
        store_i32(counts + 4 * e, n)
        atomic_add(a.local + LOC_STAT_EXPERT + 8 * e, n)
    if LAYOUT != LAYOUT_RANK:
        for e in range(thread_id(), a.num_local + 1, NUM_THREADS):
            store_i32(offsets + 4 * e, first_row(a, e))
    count_groups(a)
    if warp_id() > 0:
        return
    rows = rows_in_use(a)
    if lane_id() == 0:
        store_i32(a.local + LOC_NUM_RECORDS + 4 * a.slot, shared_u32(group_start(a, NUM_GROUPS)))
        store_i32(a.local + LOC_NUM_ROWS + 4 * a.slot, rows)


def first_row(a: Args, expert: int) -> int:
    if LAYOUT == LAYOUT_BATCHED:
        return expert * CAPACITY
    return shared_u32(expert_start(a, expert))


def count_groups(a: Args) -> None:
    """For ``comm.stats()``, a warp a group."""
    for g in range(warp_id(), NUM_GROUPS, NUM_WARPS):
        records = shared_u32(group_start(a, g + 1)) - shared_u32(group_start(a, g))
        rows = records if ROWS_PER_RANK else rows_of_group(a, g)
        if lane_id() == 0:
            atomic_add(a.local + LOC_STAT_RECV + 8 * g, records)
            atomic_add(a.local + LOC_STAT_ROWS + 8 * g, rows)


def rows_of_group(a: Args, g: int) -> int:
    rows = 0
    for e in range(lane_id(), a.num_local, 32):  # the table of the last group ends with the totals
        rows += shared_u32(rows_before(a, g + 1, e)) - shared_u32(rows_before(a, g, e))
    return warp_sum(rows)


def rows_in_use(a: Args) -> int:
    if LAYOUT == LAYOUT_RANK:
        return shared_u32(group_start(a, NUM_GROUPS))
    if LAYOUT == LAYOUT_GROUPED:
        return shared_u32(expert_start(a, a.num_local))
    rows = 0
    for e in range(lane_id(), a.num_local, 32):
        rows += shared_u32(expert_total(a, e))
    return warp_sum(rows)


# ---- received rows -----------------------------------------------------------------------------
def recv_row(a: Args, row: int) -> int:
    return a.local + LOC_X + a.slot * SLOT_X_BYTES + row * RECV_ROW_BYTES


def recv_scale(a: Args, row: int) -> int:
    return a.local + LOC_X_SCALE + 4 * (a.slot * SLOT_ROWS + row) * NUM_SCALES


def rows_aligned() -> bool:
    return RECV_ROW_BYTES % 16 == 0


def set_source(a: Args, row: int, group: int, token: int) -> None:
    store_i32(a.local + LOC_SRC_RANK + 4 * (a.slot * SLOT_ROWS + row), group)
    store_i32(a.local + LOC_SRC_TOKEN + 4 * (a.slot * SLOT_ROWS + row), token)


def write_pads(a: Args) -> None:
    """grouped: rows between an expert's last and the next one's first are zero, from nowhere."""
    e = block_id()
    while e < a.num_local:
        first = shared_u32(expert_start(a, e)) + shared_u32(expert_total(a, e))
        for row in range(first, shared_u32(expert_start(a, e + 1))):
            clear_row(recv_row(a, row), rows_aligned(), HIDDEN, WIRE_DTYPE)
            for b in range(thread_id(), NUM_SCALES, NUM_THREADS):
                store_i32(recv_scale(a, row) + 4 * b, 0)
            if thread_id() == 0:
                set_source(a, row, -1, -1)
                store_i32(a.local + LOC_ROW_WEIGHT + 4 * (a.slot * SLOT_ROWS + row), 0)
        e += num_blocks()


# ---- one record --------------------------------------------------------------------------------
def group_of(a: Args, record: int) -> int:
    """The source group of a record, by halving."""
    low, high = 0, NUM_GROUPS - 1
    while low < high:
        middle = (low + high + 1) // 2
        if shared_u32(group_start(a, middle)) <= record:
            low = middle
        else:
            high = middle - 1
    return low


def plan_record(a: Args, meta: int, j: int, group: int) -> None:
    """Warp 0, a lane a slot of top-k: which rows get a copy of record ``j``? Also keeps what the
    caller and the combine stages want to know."""
    k = lane_id()
    expert = load_i32(meta + 4 * (META_EXPERT + k)) if k < TOP_K else NO_EXPERT
    index = load_u32(meta + 4 * (META_EXPERT + TOP_K + k)) if k < TOP_K else 0
    token = load_i32(meta + 4 * META_TOKEN)
    wanted = k == 0 if LAYOUT == LAYOUT_RANK else expert != NO_EXPERT
    row = j
    if LAYOUT != LAYOUT_RANK and wanted:
        row = first_row(a, expert) + shared_u32(rows_before(a, group, expert)) + index
    lanes = ballot(wanted)
    if wanted:
        i = popcount(lanes & (1 << k) - 1)
        put_shared_i32(ROWS + 4 * i, row)
        put_shared_i64(ROW_AT + 8 * i, recv_row(a, row))
        set_source(a, row, group, token)
    if k == 0:
        put_shared_i32(NUM_COPIES, popcount(lanes))
    keep_record(a, meta, j, expert, row, wanted)


def keep_record(a: Args, meta: int, j: int, expert: int, row: int, wanted: bool) -> None:
    k = lane_id()
    kept = a.slot * NUM_GROUPS * MAX_TOKENS + j
    for i in range(k, META_EXPERT + 3 * TOP_K, 32):
        store_i32(a.local + LOC_META + kept * META_BYTES + 4 * i, load_u32(meta + 4 * i))
    if k >= TOP_K:
        return
    store_i32(a.local + LOC_ROW_OF + 4 * (kept * TOP_K + k), row)
    weight = load_u32(meta + 4 * (META_EXPERT + 2 * TOP_K + k))
    if LAYOUT == LAYOUT_RANK:
        at = 4 * ((a.slot * SLOT_ROWS + j) * TOP_K + k)
        store_i32(a.local + LOC_ROW_EXPERT + at, expert)
        store_i32(a.local + LOC_ROW_WEIGHT + at, weight)
    elif wanted:
        store_i32(a.local + LOC_ROW_WEIGHT + 4 * (a.slot * SLOT_ROWS + row), weight)
