"""combine_send: expert output rows  →  back to the rank(s) that hold the token.

Blocks take the received records in turn. reduce="receiver": one row per (token, expert), to the
place of its slot k. reduce="sender": the weighted fp32 sum over this rank's experts, rounded once,
to the place of this rank. rank layout: the caller's row, to the place of this rank. Every replica
of the source group gets a copy.

Reads: y; own meta, row_of.  Writes: peers' combine_row, combine_flag, ack.
Order: a row's bytes, block barrier, release of its flag.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.waits import *

# Shared memory: what goes back for the record in hand.
Y_ROWS = 0  # [32] addresses of rows of y
Y_WEIGHTS = 256  # [32] float32
Y_PLACES = 384  # [32] where each goes at the source
Y_TOKEN = 512
Y_GROUP = 516
NUM_Y = 520  # rows


def combine_send(a: Args) -> None:
    wait_for_earlier_kernels()
    let_next_kernel_start()
    epoch = sent_epoch(a)
    acknowledge(a, epoch)
    if not goes_on(a, epoch):
        return
    records = load_u32(a.local + LOC_NUM_RECORDS + 4 * a.slot)
    j = block_id()
    while j < records:
        if warp_id() == 0:
            plan_return(a, j)
        sync_block()  # the plan is made
        return_record(a, epoch)
        j += num_blocks()


def plan_return(a: Args, j: int) -> None:
    """Warp 0, a lane a slot of top-k: which rows of y go back for record ``j``, and where to?"""
    k = lane_id()
    sync_warp()  # no lane still reads the plan of the record before
    kept = a.slot * NUM_GROUPS * MAX_TOKENS + j
    meta = a.local + LOC_META + kept * META_BYTES
    # All that is needed, read in one go: loads that wait for no other take the time of one.
    slot = k < TOP_K
    expert = load_i32(meta + 4 * (META_EXPERT + k)) if slot else NO_EXPERT
    weight = load_u32(meta + 4 * (META_EXPERT + 2 * TOP_K + k)) if slot else 0
    row = load_u32(a.local + LOC_ROW_OF + 4 * (kept * TOP_K + k)) if slot else 0
    token, group = load_u32(meta + 4 * META_TOKEN), load_u32(meta + 4 * META_GROUP)
    own_place = load_u32(meta + 4 * META_PLACE)

    wanted = k == 0 if LAYOUT == LAYOUT_RANK else expert != NO_EXPERT
    lanes = ballot(wanted)
    if wanted:
        i = popcount(lanes & (1 << k) - 1)
        put_shared_i64(Y_ROWS + 8 * i, a.y + row * a.y_stride)
        put_shared_i32(Y_PLACES + 4 * i, own_place if ROWS_PER_RANK else k)
        put_shared_i32(Y_WEIGHTS + 4 * i, weight)
    if k == 0:
        put_shared_i32(Y_TOKEN, token)
        put_shared_i32(Y_GROUP, group)
        put_shared_i32(NUM_Y, popcount(lanes))


def return_record(a: Args, epoch: int) -> None:
    rows = 1 if SENDER_REDUCES else shared_u32(NUM_Y)
    for replica in range(REPLICAS):
        for i in range(rows):
            return_row(a, i, replica)
    sync_block()  # every thread's part of the rows comes before their flags
    if warp_id() > 0:
        return
    for replica in range(REPLICAS):
        base = source_base(a, replica)
        for i in range(lane_id(), rows, 32):
            place = shared_u32(Y_PLACES + 4 * i)
            store_release(combine_flag(a, base, shared_u32(Y_TOKEN), place), epoch)


def return_row(a: Args, i: int, replica: int) -> None:
    """Row ``i`` of the plan, or the sum of all, to one replica of the source group."""
    place = shared_u32(Y_PLACES + 4 * i)
    to = combine_row(a, source_base(a, replica), shared_u32(Y_TOKEN), place)
    if SENDER_REDUCES:
        num = shared_u32(NUM_Y)
        sum_rows(to, 1, Y_ROWS, Y_WEIGHTS, num, a.y_aligned, HIDDEN, COMBINE_DTYPE, 0)
    else:
        copy_row(to, 1, shared_i64(Y_ROWS + 8 * i), a.y_aligned, HIDDEN, COMBINE_DTYPE)


def source_base(a: Args, replica: int) -> int:
    return peer_base(a, shared_u32(Y_GROUP) * REPLICAS + replica)
