// Routing at the source: which ranks a token goes to, which place it takes there, and the numbers
// that tell every rank what to expect.
#pragma once
#include "remote_wait.cuh"

// What one token does, worked out by warp 0 and used by the whole block.
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
#define PLANS 4u
static_assert(sizeof(Plan) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

struct Counters {
    u64* peer;          // [NUM_RANKS] where each rank's symmetric part begins
    u32* expert_count;  // [NUM_EXPERTS] tokens seen so far that name it
    u32* rank_count;    // [NUM_RANKS]
    Plan* plans;        // [PLANS] of the tokens in hand
    RemoteCounts remote;
};

DEVICE u32 counters_bytes()
{
    return PLANS * sizeof(Plan) + 8 * (u32)NUM_RANKS + 4 * (u32)(NUM_EXPERTS + NUM_RANKS);
}

DEVICE Counters counters_at(u32* words)
{
    Counters s;
    s.plans = reinterpret_cast<Plan*>(words);
    s.peer = reinterpret_cast<u64*>(s.plans + PLANS);
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

// Lanes that hold the same key as this one; a lane without a key is alone.
DEVICE u32 same_key(bool has_key, u32 key)
{
    return __match_any_sync(FULL_WARP, has_key ? key : 0x80000000u | lane_id());
}

DEVICE bool is_first(u32 mask) { return __ffs(mask) - 1 == (i32)lane_id(); }

DEVICE void clear_counts(const Counters& s)
{
    const u32 words = NUM_EXPERTS + NUM_RANKS + remote_counts_words();
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) s.expert_count[i] = 0;
}

#define COUNTS_AT_ONCE 8u  // routing rows that a warp loads before it counts any

// Adds tokens [first, last) to the counters, 32 / TOP_K tokens a warp and step. An expert or rank
// that a token names twice counts once.
DEVICE void count_tokens(const Args& a, const Counters& s, u32 first, u32 last)
{
    const u32 per_step = WARP_SIZE / TOP_K, stride = num_warps() * per_step;
    const u32 sub = lane_id() / TOP_K, k = lane_id() % TOP_K;
    for (u32 t = first + warp_id() * per_step; t < last; t += COUNTS_AT_ONCE * stride) {
        u32 experts[COUNTS_AT_ONCE];
        UNROLL for (u32 i = 0; i < COUNTS_AT_ONCE; ++i) {
            const u32 token = t + i * stride + sub;
            experts[i] = sub < per_step && token < last ? expert_of(a, token, k) : NO_EXPERT;
        }
        UNROLL for (u32 i = 0; i < COUNTS_AT_ONCE; ++i) {
            if (t + i * stride >= last) break;
            const bool named = experts[i] != NO_EXPERT;
            const u32 rank = named ? expert_rank(experts[i]) : 0;
            if (is_first(same_key(named, sub << 16 | experts[i])) && named)
                atomicAdd(&s.expert_count[experts[i]], 1u);
            if (is_first(same_key(named, sub << 16 | rank)) && named)
                atomicAdd(&s.rank_count[rank], 1u);
        }
    }
}

#include "remote_send.cuh"

// The sum of the weights of all slots in `mask` (one expert, named more than once), in slot order.
DEVICE float summed_weight(float own, u32 mask)
{
    float sum = 0.0f;
    for (u32 k = 0; k < TOP_K; ++k) {
        const float w = __shfl_sync(FULL_WARP, own, k);
        if (mask >> k & 1) sum = __fadd_rn(sum, w);
    }
    return sum;
}

// What token t's routing says in this lane's slot k.
struct Slot {
    u32 expert;
    float weight;
};

DEVICE Slot load_slot(const Args& a, u32 t)
{
    const u32 k = lane_id();
    Slot slot;
    slot.expert = k < TOP_K ? expert_of(a, t, k) : NO_EXPERT;
    slot.weight = a.topk_weights && slot.expert != NO_EXPERT ? given_weight(a, t, k) : 0.0f;
    return slot;
}

// Warp 0: where does token t go? Also advances the counters and keeps the routing for combine.
DEVICE void plan_token(const Args& a, const Counters& s, u32 t, Slot slot, Plan& plan)
{
    const u32 lane = lane_id();
    __syncwarp();  // no lane still reads the plan of the token before
    const u32 expert = slot.expert;
    const bool named = expert != NO_EXPERT;
    const u32 twins = same_key(named, expert);
    const bool first = named && is_first(twins);
    const u32 rank = named ? expert_rank(expert) : 0;
    const bool opens_rank = is_first(same_key(named, rank)) && named;
    const u32 openers = __ballot_sync(FULL_WARP, opens_rank);

    u32 place = 0;  // how many destinations have a lower rank
    for (u32 k = 0; k < TOP_K; ++k) {
        const u32 other = __shfl_sync(FULL_WARP, rank, k);
        if ((openers >> k & 1) && other < rank) ++place;
    }
    const float weight = summed_weight(slot.weight, twins);

    u32 row = 0;
    if (REMOTE)
        row = number_row(a, s.remote, s.rank_count, t, named, rank,
                         __ballot_sync(FULL_WARP, first), opens_rank);
    if (opens_rank && REMOTE) {
        ++s.rank_count[rank];
        place_remote(a, s.remote, plan, place, rank, s.peer[rank], t, row);
    } else if (opens_rank) {
        const u32 i = s.rank_count[rank]++;
        const u64 base = s.peer[rank];
        plan.rank[place] = rank;
        plan.record[place] = record_at(base, a, a.rank / REPLICAS, i);
        plan.flag[place] = record_flag(base, a, a.rank / REPLICAS, i);
    }
    plan.expert[lane] = first ? expert : NO_EXPERT;
    plan.weight[lane] = weight;
    if (first) plan.index[lane] = s.expert_count[expert]++;
    if (lane == 0) plan.num_dest = __popc(openers);

    const u64 token = a.slot * MAX_TOKENS + t;
    if (lane < TOP_K) {
        const u32 route = named ? (u32)(__ffs(twins) - 1) << 16 | expert : NO_EXPERT;
        st(local_at<u32>(a, LOC_ROUTE, token * TOP_K + lane), route);
        st(local_at<float>(a, LOC_WEIGHT, token * TOP_K + lane), weight);
    }
    if (lane == 0) st(local_at<u32>(a, LOC_NUM_DEST, token), (u32)__popc(openers));
}

// Word i of the meta for destination d.
DEVICE u32 meta_word(const Args& a, const Plan& plan, u32 t, u32 d, u32 i)
{
    if (i == META_TOKEN) return t;
    if (i == META_PLACE) return d;
    if (i == META_GROUP) return (u32)(a.rank / REPLICAS);
#if HAS_REMOTE
    if (REMOTE && i == META_ROW) return plan.row[d];
#endif
    if (i < META_EXPERT || i >= META_WEIGHT + TOP_K) return 0;
    const u32 k = (i - META_EXPERT) % TOP_K;
    const u32 expert = plan.expert[k];
    const bool here = expert != NO_EXPERT && expert_rank(expert) == plan.rank[d];
    if (i < META_INDEX) return here ? expert - rank_first_expert(plan.rank[d]) : NO_EXPERT;
    if (i < META_WEIGHT) return here ? plan.index[k] : 0;
    return here ? __float_as_uint(plan.weight[k]) : 0;
}

// ---- block 0: numbers for everybody ---------------------------------------------------------------
DEVICE u32 head_count(const Counters& s, u32 dest, u32 word)
{
    if (word == 0) return s.rank_count[dest];
    if (word <= MAX_LOCAL) {
        const u32 e = word - 1;
        return e < rank_num_experts(dest) ? s.expert_count[rank_first_expert(dest) + e] : 0;
    }
    if (REMOTE && word == HEAD_ROW_BASE) return s.remote.rows[dest];
    if (REMOTE && word == HEAD_SHARE) return s.remote.records[dest];
    const u32 i = word - 1 - MAX_LOCAL;
    return LAYOUT == LAYOUT_RANK ? s.rank_count[i] : s.expert_count[i];
}

DEVICE void send_heads(const Args& a, const Counters& s, u64 epoch)
{
    for (u64 i = threadIdx.x; i < NUM_RANKS * HEAD_WORDS; i += blockDim.x) {
        const u32 dest = (u32)(i / HEAD_WORDS), word = (u32)(i % HEAD_WORDS);
        u64* at = head_words(s.peer[dest], a, a.rank) + word;
        const u64 value = count_word(epoch, head_count(s, dest, word));
        if (REMOTE && s.peer[dest] == 0) {
            stage_head_word(a, dest, word, value);
            continue;
        }
        if (word == 0)
            st_release_sys(at, value);
        else
            st_relaxed_sys(at, value);
    }
    for (u64 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) {
        atomicAdd(local_at<u64>(a, LOC_STAT_SENT, r), (u64)s.rank_count[r]);
    }
}

DEVICE void check_values(const Args& a, u32 tokens, u64 epoch)
{
    if (a.num_tokens && threadIdx.x == 0) {
        const i32 n = ld(reinterpret_cast<const i32*>(a.num_tokens));
        if ((n < 0 || (u64)n > a.max_rows) && claim_status(a, STATUS_VALUE, epoch)) {
            Status s = {CODE_BAD_NUM_TOKENS, PHASE_DISPATCH_SEND, a.rank, 0, epoch, a.max_rows,
                        (u64)(i64)n, a.slot};
            report(a, STATUS_VALUE, s);
        }
    }
    for (u64 i = threadIdx.x; i < (u64)tokens * TOP_K; i += blockDim.x) {
        const i64 expert = raw_expert(a, (u32)(i / TOP_K), (u32)(i % TOP_K));
        if (expert >= -1 && expert < (i64)NUM_EXPERTS) continue;
        if (!claim_status(a, STATUS_VALUE, epoch)) return;
        Status s = {CODE_BAD_EXPERT, PHASE_DISPATCH_SEND, a.rank, i, epoch, NUM_EXPERTS,
                    (u64)expert, a.slot};
        report(a, STATUS_VALUE, s);
        return;
    }
}

// Every rank has read what this slot's previous handle sent it.
DEVICE bool acks_arrived(const Args& a, u64 epoch)
{
    bool ok = true;
    for (u64 r = threadIdx.x; r < NUM_RANKS && ok; r += blockDim.x) {
        u64 last;
        if (is_remote(a, r)) {
            ok = wait_arrived(a, r, CHANNEL_ACK, epoch - 1, epoch, PHASE_DISPATCH_SEND);
            continue;
        }
        ok = wait_for(a, ack_flag(a.symmetric, a, r), FlagReached{epoch - 1}, epoch - 1, epoch,
                      from_rank(PHASE_DISPATCH_SEND, (u32)r), &last);
    }
    return __syncthreads_and(ok);
}

// Begins dispatch_send: fills the tables in shared memory, finds the epoch and whether the slot may be written. The words needed are
// read together, since usually all is well; only else does anybody look again.
DEVICE bool begin_send(const Args& a, const Counters& s, u64* epoch)
{
    clear_counts(s);
    for (u64 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) s.peer[r] = peer_base(a, r);
    wait_for_earlier_kernels();
    const u64 read = ld(read_word(a));
    const u64 abort = load_abort(a);
    const bool look = threadIdx.x < NUM_RANKS;
    u64 ack = read;
    if (look)
        ack = is_remote(a, threadIdx.x) ? known_ack(a, threadIdx.x)
                                        : ld_acquire_sys(ack_flag(a.symmetric, a, threadIdx.x));
    *epoch = read + 1;
    note_epoch(*epoch);
    const bool well = abort == 0 && ack >= read && NUM_RANKS <= blockDim.x;
    const bool all_well = __syncthreads_and(well);
    let_next_kernel_start();  // every block that gets here has read its words
    if (all_well) return true;
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, abort, *epoch))) return false;
    return acks_arrived(a, *epoch);
}

// Block 0 counts everything, from cleared counters, and tells all ranks. The counters are clear again
// afterwards, for a block 0 that also sends.
DEVICE void announce(const Args& a, const Counters& s, u32 tokens, u64 epoch)
{
    if (REMOTE) count_remote(a, 0, tokens, s.remote.records, s.remote.rows);
    count_tokens(a, s, 0, tokens);
    __syncthreads();
    if (REMOTE) plan_heads(a, s.remote);
    send_heads(a, s, epoch);
    if (REMOTE) send_staged_heads(a, epoch);
    if (CHECK_VALUES) check_values(a, tokens, epoch);
    if (threadIdx.x == 0) {
        st(local_at<u32>(a, LOC_NUM_TOKENS, a.slot), tokens);
        st(sent_word(a), epoch);
    }
    __syncthreads();
    clear_counts(s);
    __syncthreads();
}

// Tokens [first, last) are this block's: a contiguous share, since what comes before is counted.
struct Share {
    u32 first, last;
};

DEVICE Share token_share(u32 tokens)
{
    const u32 senders = gridDim.x > 1 ? gridDim.x - 1 : 1;  // block 0 announces
    const u32 sender = gridDim.x > 1 ? blockIdx.x - 1 : 0;
    const u32 each = (tokens + senders - 1) / senders;
    Share share;
    share.first = sender * each < tokens ? sender * each : tokens;
    share.last = share.first + each < tokens ? share.first + each : tokens;
    return share;
}
