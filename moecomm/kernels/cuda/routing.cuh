// Routing at the source: which ranks a token goes to, which place it takes there, and the numbers
// that tell every rank what to expect.
#pragma once
#include "counting.cuh"

// Lanes that hold the same key as this one; a lane without a key is alone.
DEVICE u32 same_key(bool has_key, u32 key)
{
    return __match_any_sync(FULL_WARP, has_key ? key : 0x80000000u | lane_id());
}

DEVICE bool is_first(u32 mask) { return __ffs(mask) - 1 == (i32)lane_id(); }

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
    // Both at once: the weight must not wait for the expert.
    const float weight = a.topk_weights && k < TOP_K ? given_weight(a, t, k) : 0.0f;
    slot.expert = k < TOP_K ? expert_of(a, t, k) : NO_EXPERT;
    slot.weight = slot.expert != NO_EXPERT ? weight : 0.0f;
    return slot;
}

// One warp: the ranks that lanes name, ascending, into plan.rank and plan.num_dest.
DEVICE void plan_ranks(bool named, u32 rank, Plan& plan)
{
    const u32 lane = lane_id();
    if (NUM_RANKS <= WARP_SIZE) {  // lane r stands for rank r
        const u32 mask = __reduce_or_sync(FULL_WARP, named ? 1u << rank : 0u);
        if (mask >> lane & 1) plan.rank[__popc(mask & ((1u << lane) - 1))] = lane;
        if (lane == 0) plan.num_dest = __popc(mask);
        return;
    }
    const bool opens = is_first(same_key(named, rank)) && named;
    const u32 openers = __ballot_sync(FULL_WARP, opens);
    u32 place = 0;  // how many destinations have a lower rank
    for (u32 k = 0; k < TOP_K; ++k) {
        const u32 other = __shfl_sync(FULL_WARP, rank, k);
        if ((openers >> k & 1) && other < rank) ++place;
    }
    if (opens) plan.rank[place] = rank;
    if (lane == 0) plan.num_dest = __popc(openers);
}

// One warp: which ranks and experts does token t go to? Also keeps the routing for combine.
DEVICE void plan_token(const Args& a, u32 t, Slot slot, Plan& plan)
{
    const u32 lane = lane_id();
    __syncwarp();  // no lane still reads the plan of the token before
    const bool named = slot.expert != NO_EXPERT;
    plan_ranks(named, named ? expert_rank(slot.expert) : 0, plan);
    const u32 twins = same_key(named, slot.expert);
    const bool first = named && is_first(twins);
    float weight = __fadd_rn(0.0f, slot.weight);
    if (__any_sync(FULL_WARP, named && !first)) weight = summed_weight(slot.weight, twins);
    plan.expert[lane] = first ? slot.expert : NO_EXPERT;
    plan.weight[lane] = weight;

    const u64 token = a.slot * MAX_TOKENS + t;
    if (lane < TOP_K) {
        const u32 route = named ? (u32)(__ffs(twins) - 1) << 16 | slot.expert : NO_EXPERT;
        st(local_at<u32>(a, LOC_ROUTE, token * TOP_K + lane), route);
        st(local_at<float>(a, LOC_WEIGHT, token * TOP_K + lane), weight);
    }
    __syncwarp();
    if (lane == 0) st(local_at<u32>(a, LOC_NUM_DEST, token), plan.num_dest);
}

// One warp: the places that planned token number `n` takes. The counters count what comes before
// token number 0 of those in hand; tokens 0 to n - 1 are counted here.
DEVICE void place_token(const Args& a, const Counters& s, u32 t, u32 n)
{
    Plan& plan = s.plans[n];
    const u32 lane = lane_id();
    const u32 expert = plan.expert[lane];
    const bool goes = lane < plan.num_dest;
    const u32 rank = goes ? plan.rank[lane] : 0;
    u32 row = expert != NO_EXPERT ? s.expert_count[expert] : 0;
    u32 i = goes ? s.rank_count[rank] : 0;
    for (u32 m = 0; m < n; ++m) {
        const Plan& before = s.plans[m];
        for (u32 k = 0; k < TOP_K; ++k) row += before.expert[k] == expert;
        for (u32 d = 0; d < before.num_dest; ++d) i += before.rank[d] == rank;
    }
    plan.index[lane] = row;
    if (goes && !REMOTE) {
        plan.record[lane] = record_at(s.peer[rank], a, a.rank / REPLICAS, i);
        plan.flag[lane] = record_flag(s.peer[rank], a, a.rank / REPLICAS, i);
    }
    if (REMOTE) place_remote(a, s, t, n);
    __syncwarp();
}

// One warp: the counters count a planned token, too.
DEVICE void count_planned(const Args& a, const Counters& s, u32 t, const Plan& plan)
{
    const u32 lane = lane_id(), expert = plan.expert[lane];
    if (expert != NO_EXPERT) atomicAdd(&s.expert_count[expert], 1u);
    if (lane < plan.num_dest) atomicAdd(&s.rank_count[plan.rank[lane]], 1u);
    if (REMOTE) count_remote_planned(a, s.remote, t, plan);
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
// Word 1, 2 ... for `dest`; word 0 is the number of its records.
DEVICE u32 head_count(const Counters& s, u32 dest, u32 word)
{
    if (word <= MAX_LOCAL) {
        const u32 e = word - 1;
        return e < rank_num_experts(dest) ? s.expert_count[rank_first_expert(dest) + e] : 0;
    }
    if (REMOTE && word == HEAD_ROW_BASE) return s.remote.rows[dest];
    if (REMOTE && word == HEAD_SHARE) return s.remote.records[dest];
    const u32 i = word - 1 - MAX_LOCAL;
    return LAYOUT == LAYOUT_RANK ? s.rank_count[i] : s.expert_count[i];
}

DEVICE void send_head_word(const Args& a, const Counters& s, u32 dest, u32 word, u64 value)
{
    if (REMOTE && s.peer[dest] == 0)
        stage_head_word(a, dest, word, value);
    else
        st_relaxed_sys(head_words(s.peer[dest], a, a.rank) + word, value);
}

// The first words also say that older combine rows have been read: a fence of the last warp, which
// sends them, came before. Not a release each: that would be a trip to memory after the counting.
DEVICE void send_heads(const Args& a, const Counters& s, u64 epoch)
{
    if (warp_id() == num_warps() - 1)
        for (u32 dest = lane_id(); dest < NUM_RANKS; dest += WARP_SIZE)
            send_head_word(a, s, dest, 0, count_word(epoch, s.rank_count[dest]));
    for (u32 i = threadIdx.x; i < NUM_RANKS * (HEAD_WORDS - 1); i += blockDim.x) {
        const u32 dest = i / (u32)(HEAD_WORDS - 1), word = 1 + i % (u32)(HEAD_WORDS - 1);
        send_head_word(a, s, dest, word, count_word(epoch, head_count(s, dest, word)));
    }
    for (u64 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x)
        atomicAdd(local_at<u64>(a, LOC_STAT_SENT, r), (u64)s.rank_count[r]);
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

// ---- may this slot be written? ------------------------------------------------------------------
// What dispatch_send looks at first. It goes on at once, with what only fills shared memory and local
// tables, and asks for the verdict (may_send) before it writes to a peer.
struct SendState {
    u64 read;   // the slot's last epoch whose records this rank has read
    u64 abort;
    u64 ack;    // the last warp: lowest epoch that a rank has acknowledged
};

// Fills the tables in shared memory and finds the epoch.
DEVICE SendState begin_send(const Args& a, const Counters& s, u64* epoch)
{
    clear_counts(s);
    for (u64 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) s.peer[r] = peer_base(a, r);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    SendState state;
    state.read = ld(read_word(a));
    state.abort = load_abort(a);
    state.ack = ~0ull;
    if (warp_id() == num_warps() - 1)
        for (u64 r = lane_id(); r < NUM_RANKS; r += WARP_SIZE)
            state.ack = min(state.ack, is_remote(a, r) ? known_ack(a, r)
                                                       : ld_acquire_sys(ack_flag(a.symmetric, a, r)));
    if (blockIdx.x == 0 && warp_id() == num_warps() - 1) __threadfence_system();  // see send_heads
    *epoch = state.read + 1;
    note_epoch(*epoch);
    __syncthreads();  // counters are clear
    return state;
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

// A barrier, too. Usually all is well; only else does anybody look again.
DEVICE bool may_send(const Args& a, const SendState& state, u64 epoch)
{
    if (__syncthreads_and(state.abort == 0 && state.ack >= state.read)) return true;
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, state.abort, epoch))) return false;
    return acks_arrived(a, epoch);
}

// Block 0, which has counted everything, tells all ranks. The counters are clear afterwards, for a
// block 0 that also sends. False as in wait_for.
DEVICE bool announce(const Args& a, const Counters& s, u32 tokens, const SendState& state, u64 epoch)
{
    if (REMOTE && is_divided(tokens)) count_remote_anew(a, s.remote, tokens, tokens);
    if (!may_send(a, state, epoch)) return false;
    if (REMOTE) plan_heads(a, s.remote);
    send_heads(a, s, epoch);
    if (REMOTE) send_staged_heads(a, epoch);
    if (CHECK_VALUES) check_values(a, tokens, epoch);
    if (threadIdx.x == 0) {
        st(local_at<u32>(a, LOC_NUM_TOKENS, a.slot), tokens);
        st_relaxed_sys(sent_word(a), epoch);
    }
    if (gridDim.x > 1) return true;
    __syncthreads();
    clear_counts(s);
    __syncthreads();
    return true;
}
