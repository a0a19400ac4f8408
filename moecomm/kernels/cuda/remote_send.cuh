// dispatch_send for remote peers: which record goes where in the staging area, heads, doors.
#pragma once
#include "remote_wait.cuh"
#include "team.cuh"
// Behind routing.cuh's own beginning, which includes this file.

#define REMOTE_COUNTS_AT_ONCE 8u  // routing rows that a warp loads before it counts any

// Counts all tokens, those before `begin` in `records` and `rows`, the others in `first`: records of
// this replica, rows of all. One pass, since what it takes is waiting for the routing.
DEVICE void count_remote(const Args& a, const RemoteCounts& c, u32 begin, u32 tokens)
{
    const u32 per_step = WARP_SIZE / TOP_K, stride = num_warps() * per_step;
    const u32 sub = lane_id() / TOP_K, k = lane_id() % TOP_K;
    for (u32 t = warp_id() * per_step; t < tokens; t += REMOTE_COUNTS_AT_ONCE * stride) {
        u32 experts[REMOTE_COUNTS_AT_ONCE];
        UNROLL for (u32 i = 0; i < REMOTE_COUNTS_AT_ONCE; ++i) {
            const u32 token = t + i * stride + sub;
            experts[i] = sub < per_step && token < tokens ? expert_of(a, token, k) : NO_EXPERT;
        }
        UNROLL for (u32 i = 0; i < REMOTE_COUNTS_AT_ONCE; ++i) {
            if (t + i * stride >= tokens) break;
            const u32 token = t + i * stride + sub;
            const bool named = experts[i] != NO_EXPERT;
            const u32 rank = named ? expert_rank(experts[i]) : 0;
            const bool row = is_first(same_key(named, sub << 16 | experts[i])) && named;
            const bool record = is_first(same_key(named, sub << 16 | rank)) && named;
            if (token < begin && (ROWS_PER_RANK ? record : row)) atomicAdd(&c.rows[rank], 1u);
            if (record && is_ours(a, token))
                atomicAdd(token < begin ? &c.records[rank] : &c.first[rank], 1u);
        }
    }
}

// A batch whose counting is divided among blocks: every block counts all of it for remote peers. What
// it has counted of them so far is of a part.
DEVICE void count_remote_anew(const Args& a, const RemoteCounts& c, u32 begin, u32 tokens)
{
    __syncthreads();
    for (u32 i = threadIdx.x; i < remote_counts_words(); i += blockDim.x) c.records[i] = 0;
    __syncthreads();
    count_remote(a, c, begin, tokens);
}

// What block b packs begins at first[rank] + records[rank] of each rank, of what it has counted: what
// comes before token `begin`, and everything.
DEVICE void plan_staging(const Args& a, const RemoteCounts& c, u32 begin, u32 tokens)
{
    const bool cleared = gridDim.x == 1;  // block 0 has announced, and sends, too
    if (cleared || is_divided(tokens)) count_remote_anew(a, c, begin, tokens);
    __syncthreads();
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x)
        c.first[r] = is_remote(a, r) ? c.first[r] + c.records[r] : 0;
    __syncthreads();
    if (warp_id() == 0) warp_exclusive_scan(c.first, NUM_RANKS, 1);
}

DEVICE u32 staged_for(const RemoteCounts& c, u32 rank) { return c.first[rank + 1] - c.first[rank]; }

// Rows that go back from `rank` for a planned token.
DEVICE u32 rows_back(const Plan& plan, u32 rank)
{
    u32 rows = 0;
    if (ROWS_PER_RANK)
        for (u32 d = 0; d < plan.num_dest; ++d) rows += plan.rank[d] == rank;
    else
        for (u32 k = 0; k < TOP_K; ++k)
            rows += plan.expert[k] != NO_EXPERT && expert_rank(plan.expert[k]) == rank;
    return rows;
}

// The number of the first row that `rank` gives back for token t, number n of those in hand.
DEVICE u32 first_row_back(const Counters& s, u32 n, u32 rank)
{
    u32 row = ROWS_PER_RANK ? s.rank_count[rank] : s.remote.rows[rank];
    for (u32 m = 0; m < n; ++m) row += rows_back(s.plans[m], rank);
    return row;
}

// One warp, as place_token: where the records of token t go, number n of those in hand. A record that
// is packed has no flag. The numbers of rows that come back are kept for combine_recv.
DEVICE void place_remote(const Args& a, const Counters& s, u32 t, u32 n)
{
#if HAS_REMOTE
    Plan& plan = s.plans[n];
    const u32 lane = lane_id(), expert = plan.expert[lane];
    const bool first = expert != NO_EXPERT;
    const u32 owner = first ? expert_rank(expert) : 0;
    const u32 below = same_key(first, owner) & ((1u << lane) - 1);
    if (lane < TOP_K) {
        const u32 row = first ? first_row_back(s, n, owner) + (ROWS_PER_RANK ? 0 : __popc(below)) : 0;
        st(local_at<u32>(a, LOC_RETURN_ROW, (a.slot * MAX_TOKENS + t) * TOP_K + lane), row);
    }
    if (lane >= plan.num_dest) return;
    const u32 rank = plan.rank[lane];
    u32 i = s.remote.records[rank];
    for (u32 m = 0; m < n; ++m)
        for (u32 d = 0; d < s.plans[m].num_dest; ++d)
            i += s.plans[m].rank[d] == rank && is_ours(a, t - n + m);
    const u64 base = s.peer[rank];
    plan.row[lane] = first_row_back(s, n, rank);
    plan.record[lane] = base ? record_at(base, a, a.rank, i)
                             : staged_record(a, s.remote.first[rank] + i);
    plan.flag[lane] = base ? record_flag(base, a, a.rank, i) : nullptr;
#endif
}

// One warp: the counters count a planned token, too.
DEVICE void count_remote_planned(const Args& a, const RemoteCounts& c, u32 t, const Plan& plan)
{
    if (lane_id() >= plan.num_dest) return;
    const u32 rank = plan.rank[lane_id()];
    if (is_ours(a, t)) atomicAdd(&c.records[rank], 1u);
    if (!ROWS_PER_RANK) atomicAdd(&c.rows[rank], rows_back(plan, rank));
}

// ---- block 0 --------------------------------------------------------------------------------------
// Everything is counted: `rows` becomes where each rank's rows land here, `first` where the records
// for each begin.
DEVICE void plan_heads(const Args& a, const RemoteCounts& c)
{
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x)
        c.first[r] = is_remote(a, r) ? c.records[r] : 0;
    __syncthreads();
    if (warp_id() == 0) {
        warp_exclusive_scan(c.first, NUM_RANKS, 1);
        warp_exclusive_scan(c.rows, NUM_RANKS, 1);
    }
    __syncthreads();
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) {
        st(local_at<u32>(a, LOC_RETURN_BASE, pair_number(a, r)), c.rows[r]);
        if (BOUNCE) st(return_count(a, r), c.rows[r + 1] - c.rows[r]);
        if (REMOTE != 1) continue;
        st(plan_word(a, r, PLAN_RECORD_FIRST), (u64)c.first[r]);
        st(plan_word(a, r, PLAN_RECORD_COUNT), (u64)staged_for(c, r));
    }
}

DEVICE void stage_head_word(const Args& a, u64 dest, u32 word, u64 value)
{
    st(out_head(a, dest) + word, value);
    if (word == HEAD_SHARE && HEAD_WORDS * 8 < HEAD_BYTES) st(out_head(a, dest) + HEAD_WORDS, 0ull);
}

// The heads of remote ranks are complete.
DEVICE void send_staged_heads(const Args& a, u64 epoch)
{
    __syncthreads();
    if (REMOTE == 1 && threadIdx.x == 0) ring(a, DOOR_HEAD, epoch);
    if (REMOTE != 2) return;
    for (u32 r = warp_id(); r < NUM_RANKS; r += num_warps())
        if (is_remote(a, r))
            put_warp(a, r, (u64)in_head(a, a.rank), (u64)out_head(a, r), HEAD_BYTES,
                     arrived_word(a, a.rank, CHANNEL_HEAD), epoch);
}

// ---- proxied: doors ---------------------------------------------------------------------------------
// Warp 0, once this block has packed some tokens: whether its part of the private records is done.
DEVICE bool private_done(const Args& a, const RemoteCounts& c)
{
    bool done = true;
    for (u32 r = lane_id(); r < NUM_RANKS; r += WARP_SIZE)
        if (is_remote(a, r) && c.records[r] < min(staged_for(c, r), (u32)PRIVATE_RECORDS)) done = false;
    return __all_sync(FULL_WARP, done);
}

// Warp 0 of each packing block, behind a barrier: tells the mover, once each, of private records
// and of all. `told`: whether it has spoken of the former.
DEVICE void tell_mover(const Args& a, const RemoteCounts& c, bool last, bool* told, u64 epoch)
{
    if (REMOTE != 1 || warp_id() > 0) return;
    if (!*told && (last || private_done(a, c))) {
        *told = true;
        if (lane_id() == 0) part_done(a, DOOR_PRIVATE, num_row_blocks(), epoch);
    }
    if (last && lane_id() == 0) part_done(a, DOOR_RECORDS, num_row_blocks(), epoch);
}

// One team. Whole records are moved: what is left of the last line of memory behind the scales is
// defined, too.
DEVICE void clear_tails(const Plan& plan)
{
    const u32 words = (RECORD_BYTES - RECORD_SCALE_OFF) / 4 - NUM_SCALES;
    for (u32 i = team_thread(); i < plan.num_dest * words; i += team_threads())
        st(reinterpret_cast<u32*>(plan.record[i / words] + RECORD_SCALE_OFF) + NUM_SCALES + i % words,
           0u);
}

// ---- nvshmem: chunks --------------------------------------------------------------------------------
// Which of the records for `rank` the one at `record` is.
DEVICE u32 staged_number(const Args& a, const RemoteCounts& c, u32 rank, u64 record)
{
    return (u32)((record - staged_record(a, c.first[rank])) / RECORD_BYTES);
}

// One warp, behind a barrier: the records of `plan` are packed; which chunks do they complete?
DEVICE void count_chunks(const Args& a, const RemoteCounts& c, Plan& plan)
{
#if HAS_REMOTE
    bool done = false;
    if (lane_id() < plan.num_dest && !plan.flag[lane_id()]) {
        const u32 rank = plan.rank[lane_id()];
        const u32 chunk = staged_number(a, c, rank, plan.record[lane_id()]) / (u32)REMOTE_CHUNK;
        u32* packed = packed_count(a, rank * RECORD_CHUNKS + chunk);
        done = atomic_add_acq_rel_gpu(packed, 1) + 1 == chunk_size(chunk, staged_for(c, rank));
        if (done) st(packed, 0u);  // nobody adds to it any more
    }
    const u32 mask = __ballot_sync(FULL_WARP, done);
    if (lane_id() == 0) plan.done = mask;
#endif
}

// The whole block: chunks that `plan` has completed are on their way.
DEVICE void put_chunks(const Args& a, const RemoteCounts& c, const Plan& plan, u64 epoch)
{
#if HAS_REMOTE
    for (u32 mask = plan.done; mask; mask &= mask - 1) {
        const u32 d = (u32)__ffs(mask) - 1, rank = plan.rank[d];
        const u32 chunk = staged_number(a, c, rank, plan.record[d]) / (u32)REMOTE_CHUNK;
        const u32 first = chunk * (u32)REMOTE_CHUNK;
        put_block(a, rank, landed_record(a, a.rank, first), staged_record(a, c.first[rank] + first),
                  chunk_size(chunk, staged_for(c, rank)) * RECORD_BYTES,
                  arrived_word(a, a.rank, CHANNEL_RECORDS + chunk), epoch);
    }
#endif
}

// Behind the barrier after `num` tokens of this block are packed. Whole block.
DEVICE void put_packed(const Args& a, const RemoteCounts& c, Plan* plans, u32 first, u32 num, u64 epoch)
{
    for (u32 i = warp_id(); i < num; i += num_warps())
        if (is_ours(a, first + i)) count_chunks(a, c, plans[i]);
    __syncthreads();  // all know what is complete, and may read it
    for (u32 i = 0; i < num; ++i)
        if (is_ours(a, first + i)) put_chunks(a, c, plans[i], epoch);
    // put_block has a barrier inside, so nobody is still behind the last one that had something.
}
