"""dispatch_recv: records of all groups  →  rows of recv.x, in (expert, group, token) order.

Every block waits for all heads and works out where each group's rows of each expert begin (prefix
sums over groups, then over experts). Then blocks take records in turn: wait for a record's flag,
copy its row to every local expert that wants it. Block 0 also writes counts and offsets.

Reads: own head, record, record_flag.  Writes: own received rows, meta, row_of.
Order: acquire of a record's flag, block barrier, its bytes.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.placement import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.waits import *


def dispatch_recv(a: Args) -> None:
    # It may run beside its dispatch_send: it reads nothing that that writes on this rank.
    epoch = load_i64(read_word(a)) + 1
    note_epoch(epoch)
    if any_thread(thread_id() == 0 and aborted(a, load_abort(a), epoch)):
        return
    if place_rows(a, epoch):
        receive_records(a, epoch)
    wait_for_earlier_kernels()  # whoever waits for this kernel also waits for dispatch_send


def receive_records(a: Args, epoch: int) -> None:
    total = shared_u32(group_start(a, NUM_GROUPS))
    j = max(block_id() - 1, 0)  # block 0 counts
    while j < total:
        if not receive_record(a, j, epoch):
            return
        j += max(num_blocks() - 1, 1)


def receive_record(a: Args, j: int, epoch: int) -> bool:
    """The whole block, record ``j`` of all groups' records. False as in ``wait_for_flag``."""
    group = group_of(a, j)
    i = j - shared_u32(group_start(a, group))
    record = record_at(a, a.symmetric, group, i)
    ok = warp_id() > 0 or wait_and_plan(a, record, j, group, i, epoch)
    if not all_threads(ok):  # the plan is made
        return False
    copy_record(a, record)
    sync_block()  # nobody still reads the plan
    return True


def wait_and_plan(a: Args, record: int, j: int, group: int, i: int, epoch: int) -> bool:
    """Warp 0. False as in ``wait_for_flag``."""
    ok = True
    if lane_id() == 0:
        flag = record_flag(a, a.symmetric, group, i)
        ok = wait_for_flag(a, flag, epoch, epoch, DISPATCH_RECV, group * REPLICAS, REPLICAS)
    if not all_lanes(ok):
        return False
    sync_warp()  # what lane 0 acquired holds for all
    plan_record(a, record, j, group)
    return True


def copy_record(a: Args, record: int) -> None:
    """Row and scales to every row that wants them."""
    num = shared_u32(NUM_COPIES)
    spread_row(ROW_AT, num, 0, rows_aligned(), record + RECORD_ROW_OFF, 1, HIDDEN, WIRE_DTYPE)
    for b in range(thread_id(), NUM_SCALES, NUM_THREADS):
        scale = load_u32(record + RECORD_SCALE_OFF + 4 * b)
        for i in range(num):
            store_i32(recv_scale(a, shared_u32(ROWS + 4 * i)) + 4 * b, scale)
