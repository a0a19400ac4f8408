"""dispatch_send: row of token t  →  record on every rank that hosts one of its experts.

One copy per destination rank. A record lands at place i of (slot, source group), i counting the
group's tokens for that rank; its meta says which local experts want the row and which place it has
among the group's rows of each. All places follow from (token, slot) order by counting, so they are
the same in every run, and no rank asks another.

Block 0 counts everything and tells every rank its numbers ("head"). The other blocks take a
contiguous share of tokens each: count what comes before it, then send token by token. With
replicas every one of them counts all tokens and sends those with t % REPLICAS == its number.

Writes: peers' head, record, record_flag; own route, num_dest, weight, num_tokens, epoch.
Order: a record's bytes, block barrier, release of its flag.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.routing import *


def dispatch_send(a: Args) -> None:
    epoch = begin_send(a)
    if epoch < 0:
        return
    tokens = token_count(a)
    if block_id() == 0:
        announce(a, tokens, epoch)
    if block_id() > 0 or num_blocks() == 1:
        send_share(a, tokens, epoch)


def send_share(a: Args, tokens: int, epoch: int) -> None:
    senders = max(num_blocks() - 1, 1)  # block 0 announces
    sender = max(block_id() - 1, 0)
    each = quotient(tokens + senders - 1, senders)
    first = min(sender * each, tokens)
    count_tokens(a, first)
    sync_block()
    for t in range(first, min(first + each, tokens)):
        send_token(a, t, epoch)


def send_token(a: Args, t: int, epoch: int) -> None:
    if warp_id() == 0:
        plan_token(a, t)
    sync_block()  # the plan is made
    if t % REPLICAS != a.rank % REPLICAS:
        return
    num_dest = shared_u32(NUM_DEST)
    send_row(a, t, num_dest)
    send_meta(a, t, num_dest)
    sync_block()  # every thread's part of the records comes before their flags
    if thread_id() < num_dest:
        store_release(shared_i64(FLAGS + 8 * thread_id()), epoch)


def send_row(a: Args, t: int, num_dest: int) -> None:
    """Row and scales, as they are or cast to fp8, to every destination."""
    row = a.x + t * a.x_stride
    if INPUT_DTYPE != WIRE_DTYPE:
        cast_row(
            RECORDS, num_dest, RECORD_ROW_OFF, RECORD_SCALE_OFF,
            row, a.x_aligned, INPUT_DTYPE, HIDDEN, SCALE_BLOCK, SCALE_POW2,
        )  # fmt: skip
        return
    spread_row(RECORDS, num_dest, RECORD_ROW_OFF, 1, row, a.x_aligned, HIDDEN, WIRE_DTYPE)
    scales = a.x_scale + t * a.x_scale_row_stride
    for b in range(thread_id(), NUM_SCALES, NUM_THREADS):
        scale = load_u32(scales + b * a.x_scale_col_stride)
        for d in range(num_dest):
            store_i32(shared_i64(RECORDS + 8 * d) + RECORD_SCALE_OFF + 4 * b, scale)


def send_meta(a: Args, t: int, num_dest: int) -> None:
    words = META_BYTES // 4
    for i in range(thread_id(), num_dest * words, NUM_THREADS):
        d, word = i // words, i % words
        store_i32(shared_i64(RECORDS + 8 * d) + 4 * word, meta_word(a, t, d, word))
