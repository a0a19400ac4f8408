// Counting at the source: how many tokens name each expert, and how many go to each rank.
//
// Where a token's record goes follows from how many before it go to the same rank, and its row's
// place from how many before it name the same expert. So each block counts what comes before its
// tokens. In a large batch that would be most of the work: there the tokens are cut into chunks, each
// is counted by one block, which leaves its numbers in local memory, and the others add those up.
#pragma once
#include "remote_wait.cuh"

// What one token does, worked out by one warp.
struct Plan {
    u64 record[WARP_SIZE];  // [num_dest] address of the record at that destination
    u64* flag[WARP_SIZE];   // [num_dest] its flag
    u32 rank[WARP_SIZE];    // [num_dest], ascending
    u32 expert[WARP_SIZE];  // [k] global id, or NO_EXPERT: dropped, or named before in this row
    u32 index[WARP_SIZE];   // [k] place among the group's rows of that expert
    float weight[WARP_SIZE];
    u32 num_dest;
#if HAS_REMOTE
    u32 row[WARP_SIZE];     // [num_dest] number of the first row that comes back from there
    u32 done;               // nvshmem: destinations for which the record completed a chunk
#endif
};
static_assert(sizeof(Plan) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

#define MOST_KEPT 16u  // experts of a token that a thread keeps in registers while it counts
#define COUNT_WORDS ((u32)(NUM_EXPERTS + NUM_RANKS))

struct Counters {
    u64* peer;          // [NUM_RANKS] where each rank's symmetric part begins
    u32* expert_count;  // [NUM_EXPERTS] tokens seen so far that name it
    u32* rank_count;    // [NUM_RANKS] that go there; right behind expert_count
    Plan* plans;        // of the tokens in hand
    RemoteCounts remote;
};

// `plans`: tokens that a block has in hand at a time (kernels/geometry.py: plans).
DEVICE u32 counters_bytes(u32 plans)
{
    return plans * (u32)sizeof(Plan) + 8 * (u32)NUM_RANKS + 4 * COUNT_WORDS;
}

DEVICE Counters counters_at(u32* words, u32 plans)
{
    Counters s;
    s.plans = reinterpret_cast<Plan*>(words);
    s.peer = reinterpret_cast<u64*>(s.plans + plans);
    s.expert_count = reinterpret_cast<u32*>(s.peer + NUM_RANKS);
    s.rank_count = s.expert_count + NUM_EXPERTS;
    s.remote = remote_counts_at(s.rank_count + NUM_RANKS);
    return s;
}

// ---- routing ----------------------------------------------------------------------------------
DEVICE u32 token_count(const Args& a)
{
    if (!a.num_tokens) return (u32)a.max_rows;
    const i32 n = ld(reinterpret_cast<const i32*>(a.num_tokens));
    return n < 0 ? 0 : (u64)n > a.max_rows ? (u32)a.max_rows : (u32)n;
}

DEVICE i64 raw_expert(const Args& a, u32 token, u32 k)
{
    const u64 row = a.topk_idx + token * a.topk_idx_stride;
    if (a.topk_idx_bytes == 8) return ld(reinterpret_cast<const i64*>(row) + k);
    return ld(reinterpret_cast<const i32*>(row) + k);
}

DEVICE u32 expert_of(const Args& a, u32 token, u32 k)
{
    const i64 expert = raw_expert(a, token, k);
    return expert >= 0 && expert < (i64)NUM_EXPERTS ? (u32)expert : NO_EXPERT;
}

DEVICE void clear_counts(const Counters& s)
{
    for (u32 i = threadIdx.x; i < COUNT_WORDS + remote_counts_words(); i += blockDim.x)
        s.expert_count[i] = 0;
}

// Whether this replica is the one that sends token t.
DEVICE bool is_ours(const Args& a, u32 t) { return t % REPLICAS == a.rank % REPLICAS; }

// For remote peers tokens `before` a block's share are counted in `records` and `rows`, the others in
// `first`: records of this replica, rows of all.
DEVICE void count_rank(const Args& a, const Counters& s, u32 t, u32 rank, bool before)
{
    if (before) atomicAdd(&s.rank_count[rank], 1u);
    if (REMOTE && before && ROWS_PER_RANK) atomicAdd(&s.remote.rows[rank], 1u);
    if (REMOTE && is_ours(a, t))
        atomicAdd(before ? &s.remote.records[rank] : &s.remote.first[rank], 1u);
}

DEVICE void count_expert(const Counters& s, u32 expert, u32 rank)
{
    atomicAdd(&s.expert_count[expert], 1u);
    if (REMOTE && !ROWS_PER_RANK) atomicAdd(&s.remote.rows[rank], 1u);
}

// Adds token t to the counters; one that is not `before` the block's share only where it counts for
// remote peers. An expert or rank that it names twice counts once.
DEVICE void count_token(const Args& a, const Counters& s, u32 t, bool before)
{
    u32 experts[MOST_KEPT];  // [TOP_K]
    UNROLL for (u32 k = 0; k < TOP_K; ++k) experts[k] = expert_of(a, t, k);
    u32 ranks = 0;  // one bit each, where they are so few
    UNROLL for (u32 k = 0; k < TOP_K; ++k) {
        if (experts[k] == NO_EXPERT) continue;
        const u32 rank = expert_rank(experts[k]);
        bool same_expert = false, same_rank = false;
        UNROLL for (u32 j = 0; j < k; ++j) {
            same_expert |= experts[j] == experts[k];
            if (NUM_RANKS > 32)
                same_rank |= experts[j] != NO_EXPERT && expert_rank(experts[j]) == rank;
        }
        if (!same_expert && before) count_expert(s, experts[k], rank);
        if (NUM_RANKS > 32 && !same_rank) count_rank(a, s, t, rank, before);
        if (NUM_RANKS <= 32) ranks |= 1u << rank;
    }
    for (; ranks; ranks &= ranks - 1) count_rank(a, s, t, __ffs(ranks) - 1, before);
}

// The same where a thread has no registers for all of a token's experts: read again and again.
DEVICE void count_long_token(const Args& a, const Counters& s, u32 t, bool before)
{
    NO_UNROLL for (u32 k = 0; k < TOP_K; ++k) {
        const u32 expert = expert_of(a, t, k);
        if (expert == NO_EXPERT) continue;
        const u32 rank = expert_rank(expert);
        bool same_expert = false, same_rank = false;
        NO_UNROLL for (u32 j = 0; j < k; ++j) {
            const u32 other = expert_of(a, t, j);
            same_expert |= other == expert;
            same_rank |= other != NO_EXPERT && expert_rank(other) == rank;
        }
        if (!same_expert && before) count_expert(s, expert, rank);
        if (!same_rank) count_rank(a, s, t, rank, before);
    }
}

// Adds tokens [first, last) to the counters, a thread a token; of those from `begin` on only what
// remote peers get.
DEVICE void count_tokens(const Args& a, const Counters& s, u32 first, u32 last, u32 begin)
{
    for (u32 t = first + threadIdx.x; t < last; t += blockDim.x) {
        const bool before = !REMOTE || t < begin;
        if (TOP_K <= MOST_KEPT)
            count_token(a, s, t, before);
        else
            count_long_token(a, s, t, before);
    }
}

// ---- shares -----------------------------------------------------------------------------------
// Tokens [first, last) are this block's: a contiguous share, since what comes before is counted.
struct Share {
    u32 first, last;
};

DEVICE Share token_share(u32 tokens)
{
    const u32 each = (tokens + num_row_blocks() - 1) / num_row_blocks();
    Share share;
    share.first = min(row_block() * each, tokens);
    share.last = min(share.first + each, tokens);
    return share;
}

// ---- chunks -------------------------------------------------------------------------------------
#define CHUNK ((u32)COUNT_CHUNK)

DEVICE u32 num_chunks(u32 tokens) { return (tokens + CHUNK - 1) / CHUNK; }

DEVICE u32* chunk_counts(const Args& a, u32 chunk)
{
    return local_at<u32>(a, LOC_CHUNK_COUNT, (a.slot * COUNT_CHUNKS + chunk) * COUNT_WORDS);
}

DEVICE u64* chunk_flag(const Args& a, u32 chunk)
{
    return local_at<u64>(a, LOC_CHUNK_FLAG, a.slot * COUNT_CHUNKS + chunk);
}

// The block's share of the chunks, counted for all. Counters are clear before and after.
DEVICE void publish_counts(const Args& a, const Counters& s, u32 tokens, u64 epoch)
{
    for (u32 chunk = row_block(); chunk < num_chunks(tokens); chunk += num_row_blocks()) {
        const u32 end = min((chunk + 1) * CHUNK, tokens);
        count_tokens(a, s, chunk * CHUNK, end, end);
        __syncthreads();
        for (u32 i = threadIdx.x; i < COUNT_WORDS; i += blockDim.x)
            st(chunk_counts(a, chunk) + i, s.expert_count[i]);
        __syncthreads();  // every thread's numbers come before the flag
        if (threadIdx.x == 0) st_release_sys(chunk_flag(a, chunk), epoch);
        clear_counts(s);
        __syncthreads();
    }
}

// Adds the first `num` chunks to the counters. False as in wait_for.
DEVICE bool add_chunks(const Args& a, const Counters& s, u32 num, u64 epoch)
{
    bool ok = true;
    for (u32 chunk = threadIdx.x; chunk < num && ok; chunk += blockDim.x)
        ok = wait_flag(a, chunk_flag(a, chunk), epoch, from_rank(PHASE_DISPATCH_SEND, (u32)a.rank));
    if (!__syncthreads_and(ok)) return false;
    for (u32 i = threadIdx.x; i < COUNT_WORDS; i += blockDim.x) {
        u32 sum = 0;
        UNROLL_BY(8) for (u32 chunk = 0; chunk < num; ++chunk) sum += ld(chunk_counts(a, chunk) + i);
        atomicAdd(&s.expert_count[i], sum);
    }
    return true;
}

// Whether blocks divide the counting of so many tokens.
DEVICE bool is_divided(u32 tokens) { return COUNT_CHUNKS > 1 && num_chunks(tokens) > 1; }

// Adds tokens [0, last), of `tokens`, to clear counters; a barrier must follow. False as in wait_for.
DEVICE bool count_before(const Args& a, const Counters& s, u32 last, u32 tokens, u64 epoch)
{
    const u32 whole = is_divided(tokens) ? last / CHUNK : 0;
    if (whole > 0 && !add_chunks(a, s, whole, epoch)) return false;
    const u32 end = REMOTE && !is_divided(tokens) ? tokens : last;
    count_tokens(a, s, whole * CHUNK, end, last);
    return true;
}
