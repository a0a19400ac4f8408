// The way back for remote peers: rows packed a source group, counted, and found where they land.
#pragma once
#include "remote_wait.cuh"
#include "team.cuh"

// ---- dispatch_recv, block 0: where combine_send packs, and where its rows land ---------------------
// `group_rows`: [NUM_GROUPS + 1] shared words, rows that each group gets back from here; this
// makes their beginnings of them. Groups without a remote replica need no room.
DEVICE void plan_returns(const Args& a, u32* group_rows)
{
    for (u32 g = threadIdx.x; g < NUM_GROUPS; g += blockDim.x) {
        bool remote = false;
        for (u32 d = 0; d < REPLICAS; ++d) remote = remote || is_remote(a, g * REPLICAS + d);
        if (!remote) group_rows[g] = 0;
    }
    __syncthreads();
    if (warp_id() == 0) warp_exclusive_scan(group_rows, NUM_GROUPS, 1);
    __syncthreads();
    for (u32 g = threadIdx.x; g <= NUM_GROUPS; g += blockDim.x) st(staged_first(a) + g, group_rows[g]);
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) {
        const bool remote = is_remote(a, r);
        const u32 g = r / (u32)REPLICAS;
        const u32 base = remote ? count_value(ld(in_head(a, r) + HEAD_ROW_BASE)) : 0;
        st(local_at<u32>(a, LOC_ROW_BASE, pair_number(a, r)), base);
        if (REMOTE != 1) continue;
        st(plan_word(a, r, PLAN_ROW_FIRST), (u64)group_rows[g]);
        st(plan_word(a, r, PLAN_ROW_COUNT), (u64)(remote ? group_rows[g + 1] - group_rows[g] : 0));
        st(plan_word(a, r, PLAN_ROW_BASE), (u64)base);
    }
}

// ---- combine_send -------------------------------------------------------------------------------------
// nvshmem, one warp, behind a warp barrier: rows [first, first + num) of `group` are packed. Lanes
// whose row has completed a chunk.
DEVICE u32 completed_rows(const Args& a, u32 group, u32 first, u32 num)
{
    bool done = false;
    if (lane_id() < num) {
        const u32 chunk = (first + lane_id()) / (u32)REMOTE_CHUNK;
        const u32 total = ld(staged_first(a) + group + 1) - ld(staged_first(a) + group);
        u32* packed = packed_count(a, NUM_RANKS * RECORD_CHUNKS + group * ROW_CHUNKS + chunk);
        done = atomic_add_acq_rel_gpu(packed, 1) + 1 == chunk_size(chunk, total);
        if (done) st(packed, 0u);  // nobody adds to it any more
    }
    return __ballot_sync(FULL_WARP, done);
}

// nvshmem, the whole block: the chunk of row n of `group` goes to every remote replica.
DEVICE void put_rows(const Args& a, u32 group, u32 n, u64 epoch)
{
    const u32 begin = ld(staged_first(a) + group), total = ld(staged_first(a) + group + 1) - begin;
    const u32 chunk = n / (u32)REMOTE_CHUNK, first = chunk * (u32)REMOTE_CHUNK;
    for (u32 r = group * (u32)REPLICAS; r < (group + 1) * REPLICAS; ++r) {
        if (!is_remote(a, r)) continue;
        const u32 base = ld(local_at<u32>(a, LOC_ROW_BASE, pair_number(a, r)));
        put_block(a, r, landed_row(a, base + first), staged_row(a, begin + first),
                  chunk_size(chunk, total) * COMBINE_STRIDE,
                  arrived_word(a, a.rank, CHANNEL_ROWS + chunk), epoch);
    }
}

// proxied: this warp has packed all its rows (behind a warp barrier), or has none. The last warp
// of all rings.
DEVICE void rows_packed(const Args& a, u64 epoch)
{
    if (leads_team() && lane_id() == 0) part_done(a, DOOR_ROWS, gridDim.x * num_teams(), epoch);
}

// ---- combine_recv --------------------------------------------------------------------------------------
// Where the row of token t, slot k, lands if it comes from the remote rank `peer`; and with what.
struct Landing {
    u32 row;
    u32 channel;
};

DEVICE Landing find_landing(const Args& a, u32 t, u32 k, u32 peer)
{
    const u32 n = ld(local_at<u32>(a, LOC_RETURN_ROW, (a.slot * MAX_TOKENS + t) * TOP_K + k));
    Landing landing;
    landing.row = ld(local_at<u32>(a, LOC_RETURN_BASE, pair_number(a, peer))) + n;
    landing.channel = row_channel(n);
    return landing;
}
