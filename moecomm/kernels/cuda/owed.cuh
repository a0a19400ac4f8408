// What one of our tokens gets back: how many rows, where they land, who owes them, their weights.
#pragma once
#include "dtype.cuh"
#include "remote_rows.cuh"

struct Owed {  // in shared memory, filled by one warp
    u32 num;               // rows owed
    u32 place[WARP_SIZE];  // [num] ascending
    u32 peer[WARP_SIZE];   // who owes each
    float weight[WARP_SIZE];
#if HAS_REMOTE
    u32 landing[WARP_SIZE];  // which row it becomes, of a remote peer
    u32 channel[WARP_SIZE];  // what it comes with; 0: the peer is within reach
#endif
};
static_assert(sizeof(Owed) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

// The weight of slot `lane` with those of later slots that name the same expert, in slot order.
DEVICE float slot_weight(const Args& a, u32 t, u32 route)
{
    const u64 token = a.slot * MAX_TOKENS + t;
    const u32 lane = lane_id();
    if (!a.topk_weights)
        return lane < TOP_K ? ld(local_at<float>(a, LOC_WEIGHT, token * TOP_K + lane)) : 0.0f;
    const bool named = route != NO_EXPERT;
    const float given = lane < TOP_K ? given_weight(a, t, lane) : 0.0f;  // waits for no route
    const float own = named ? given : 0.0f;
    float sum = 0.0f;
    for (u32 k = 0; k < TOP_K; ++k) {
        const float w = __shfl_sync(FULL_WARP, own, k);
        if (__shfl_sync(FULL_WARP, route, k) == route && named) sum = __fadd_rn(sum, w);
    }
    return sum;
}

DEVICE void load_owed(const Args& a, Owed& all, u32 t)
{
    const u64 token = a.slot * MAX_TOKENS + t;
    const u32 lane = lane_id();
    const u32 route =
        lane < TOP_K ? ld(local_at<u32>(a, LOC_ROUTE, token * TOP_K + lane)) : NO_EXPERT;
    const bool named = route != NO_EXPERT;
    const u32 rank = named ? expert_rank(route & 0xffffu) : 0;
    bool owed = named && route >> 16 == lane;
    u32 place = lane;
    float weight = 1.0f;
    if (ROWS_PER_RANK) {
        // The first lane that names a rank stands for it; its place counts lower ranks.
        const u32 twins = __match_any_sync(FULL_WARP, named ? rank : 0x80000000u | lane);
        owed = named && __ffs(twins) - 1 == (i32)lane;
        const u32 openers = __ballot_sync(FULL_WARP, owed);
        place = 0;
        for (u32 k = 0; k < TOP_K; ++k) {
            const u32 other = __shfl_sync(FULL_WARP, rank, k);
            if ((openers >> k & 1) && other < rank) ++place;
        }
    } else {
        weight = slot_weight(a, t, route);
    }
    const u32 mask = __ballot_sync(FULL_WARP, owed);
    const u32 at = ROWS_PER_RANK ? place : __popc(mask & ((1u << lane) - 1));
    if (owed) {
        all.place[at] = place;
        all.peer[at] = rank;
        all.weight[at] = weight;
#if HAS_REMOTE
        if (REMOTE) {
            const Landing landing = find_landing(a, t, lane, rank);
            all.landing[at] = landing.row;
            all.channel[at] = is_remote(a, rank) ? landing.channel : 0;
        }
#endif
    }
    if (lane == 0) all.num = __popc(mask);
}

// Where owed row i of token t lies.
DEVICE u64 owed_row(const Args& a, const Owed& owed, u32 t, u32 i)
{
#if HAS_REMOTE
    if (REMOTE && owed.channel[i]) return landed_row(a, owed.landing[i]);
#endif
    return combine_row(a.symmetric, a, t, owed.place[i]);
}

// One thread: it is there.
DEVICE bool owed_arrived(const Args& a, const Owed& owed, u32 t, u32 i, u64 epoch)
{
#if HAS_REMOTE
    if (REMOTE && owed.channel[i])
        return wait_arrived(a, owed.peer[i], owed.channel[i], epoch, epoch, PHASE_COMBINE_RECV);
#endif
    return wait_flag(a, combine_flag(a.symmetric, a, t, owed.place[i]), epoch,
                     from_rank(PHASE_COMBINE_RECV, owed.peer[i]));
}
