"""combine_recv: out[t] = sum over places of (weight *) returned row, in fp32, rounded once.

Blocks take this rank's tokens in turn; each waits for exactly the rows that its token is owed,
which the routing kept by dispatch_send tells. Places count slots k (reduce="receiver": weighted
here) or destination ranks in ascending order (already weighted).

Reads: own combine_row, combine_flag, route, weight.  Writes: out.
Order: acquire of a row's flag, block barrier, its bytes.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.routing import *
from moecomm.kernels.numba.waits import *

# Shared memory: the rows that the token in hand is owed, in ascending order of their places.
OWED_ROWS = 0  # [32] addresses
OWED_WEIGHTS = 256  # [32] float32
NUM_OWED = 384
ONE = 0x3F800000  # 1.0


def combine_recv(a: Args) -> None:
    tokens = load_u32(a.local + LOC_NUM_TOKENS + 4 * a.slot)
    epoch = sent_epoch(a)
    if goes_on(a, epoch):
        receive_tokens(a, tokens, epoch)
    wait_for_earlier_kernels()  # whoever waits for this kernel also waits for combine_send


def receive_tokens(a: Args, tokens: int, epoch: int) -> None:
    t = block_id()
    while t < tokens:
        ok = warp_id() > 0 or wait_for_rows(a, t, epoch)
        if not all_threads(ok):  # the list is made, and all its rows are there
            return
        sum_rows(
            a.out + t * a.out_stride, a.out_aligned, OWED_ROWS, OWED_WEIGHTS, shared_u32(NUM_OWED),
            1, HIDDEN, COMBINE_DTYPE, a.accumulate,
        )  # fmt: skip
        sync_block()  # nobody still reads the list
        t += num_blocks()


def wait_for_rows(a: Args, t: int, epoch: int) -> bool:
    """Warp 0, a lane a slot of top-k: list what token ``t`` is owed, and wait for it."""
    k = lane_id()
    token = a.slot * MAX_TOKENS + t
    route = NO_EXPERT
    if k < TOP_K:
        route = load_i32(a.local + LOC_ROUTE + 4 * (token * TOP_K + k))
    named = route != NO_EXPERT
    rank = expert_rank(route & 0xFFFF) if named else 0
    owed = named and route >> 16 == k  # the first slot that names this expert
    place, weight = k, ONE
    if ROWS_PER_RANK:  # the first slot that names this rank
        owed = is_first(same_key(named, rank)) and named
        place = lower_ranks(ballot(owed), rank)
    else:
        weight = slot_weight(a, t, route)
    lanes = ballot(owed)
    ok = True
    if owed:
        i = place if ROWS_PER_RANK else popcount(lanes & (1 << k) - 1)
        put_shared_i64(OWED_ROWS + 8 * i, combine_row(a, a.symmetric, t, place))
        put_shared_i32(OWED_WEIGHTS + 4 * i, weight)
        flag = combine_flag(a, a.symmetric, t, place)
        ok = wait_for_flag(a, flag, epoch, epoch, COMBINE_RECV, rank, 1)
    if k == 0:
        put_shared_i32(NUM_OWED, popcount(lanes))
    return all_lanes(ok)


def slot_weight(a: Args, t: int, route: int) -> int:
    """The weight of this lane's slot with those of later slots that name the same expert."""
    k = lane_id()
    if a.topk_weights == 0:  # given to dispatch, and summed there
        token = a.slot * MAX_TOKENS + t
        return load_u32(a.local + LOC_WEIGHT + 4 * (token * TOP_K + k)) if k < TOP_K else 0
    own = given_weight(a, t, k) if route != NO_EXPERT else 0
    total = 0
    for other in range(TOP_K):
        weight = shuffle(own, other)
        if shuffle(route, other) == route and route != NO_EXPERT:
            total = add_floats(total, weight)
    return total
