// dispatch_send: row of token t  →  record on every rank that hosts one of its experts.
//
// One copy per destination rank. A record lands at place i of (slot, source group), i counting
// the group's tokens for that rank; its meta says which local experts want the row and which
// place it has among the group's rows of each. All places follow from (token, slot k) order by
// counting, so they are the same in every run, and no rank asks another.
//
// Block 0 counts everything and tells every rank its numbers ("head"). The other blocks take a
// contiguous share of tokens each: count what comes before it, then send a few at a time. With
// replicas every one of them counts all tokens and sends those with t % REPLICAS == its number.
//
// Writes: peers' head, record, record_flag; own route, num_dest, weight, num_tokens, epoch.
// Order: a record's bytes, block barrier, release of its flag. Heads carry their epoch in the
// word; the first is released, since it also says that older combine rows have been read.
#include "routing.cuh"
#include "wire_row.cuh"

// Straight to every destination.
struct ToRecords {
    const Plan& plan;

    DEVICE void row_chunk(u64 c, Chunk chunk) const
    {
        for (u32 d = 0; d < plan.num_dest; ++d)
            st_v4((void*)(plan.record[d] + RECORD_ROW_OFF + c * 16), to_v4(chunk));
    }

    DEVICE void row_scale(u64 block, float scale) const
    {
        for (u32 d = 0; d < plan.num_dest; ++d)
            st(reinterpret_cast<float*>(plan.record[d] + RECORD_SCALE_OFF) + block, scale);
    }
};

DEVICE void send_meta(const Args& a, const Plan& plan, u32 t)
{
    const u32 chunks = META_BYTES / 16;
    for (u32 i = threadIdx.x; i < plan.num_dest * chunks; i += blockDim.x) {
        const u32 d = i / chunks, c = i % chunks;
        uint4 v;
        v.x = meta_word(a, plan, t, d, 4 * c);
        v.y = meta_word(a, plan, t, d, 4 * c + 1);
        v.z = meta_word(a, plan, t, d, 4 * c + 2);
        v.w = meta_word(a, plan, t, d, 4 * c + 3);
        st_v4((void*)(plan.record[d] + c * 16), v);
    }
}

// Tokens [first, last), PLANS at most. Their flags come together at the end: on a busy link a
// release waits 10 µs for its data to arrive, and there is one such wait for all of them.
DEVICE void send_group(const Args& a, const Counters& s, u32 first, u32 last, u64 epoch)
{
    const u32 replica = (u32)(a.rank % REPLICAS);
    for (u32 t = first; t < last; ++t) {
        Plan& plan = s.plans[t - first];
        if (warp_id() == 0) plan_token(a, s, t, load_slot(a, t), plan);
        __syncthreads();  // the plan is made
        if (t % REPLICAS != replica) continue;
        ToRecords records = {plan};
        make_row(a, t, records);
        send_meta(a, plan, t);
        if (REMOTE) clear_tails(plan);
    }
    __syncthreads();  // every thread's part of the records comes before their flags
    for (u32 i = threadIdx.x; i < (last - first) * WARP_SIZE; i += blockDim.x) {
        const Plan& plan = s.plans[i / WARP_SIZE];
        if ((first + i / WARP_SIZE) % REPLICAS == replica && lane_id() < plan.num_dest &&
            (!REMOTE || plan.flag[lane_id()]))
            st_release_sys(plan.flag[lane_id()], epoch);
    }
    // Each plan was read last by the warp of its number: warp 0 may make the next one at once, and
    // makes the others behind the next barrier.
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_send(Args a)
{
    DYNAMIC_SHARED(u32, words);
    const Counters s = counters_at(words);
    u64 epoch;
    if (!begin_send(a, s, &epoch)) return;
    const u32 tokens = token_count(a);
    if (blockIdx.x == 0) announce(a, s, tokens, epoch);
    if (blockIdx.x > 0 || gridDim.x == 1) {
        const Share share = token_share(tokens);
        count_tokens(a, s, 0, share.first);
        if (REMOTE) plan_staging(a, s.remote, share.first, tokens);
        __syncthreads();
        bool told = false;
        for (u32 t = share.first; t < share.last; t += PLANS) {
            const u32 last = min(t + PLANS, share.last);
            send_group(a, s, t, last, epoch);
            if (REMOTE == 1) tell_mover(a, s.remote, false, &told, epoch);
            if (REMOTE == 2) put_packed(a, s.remote, s.plans, t, last - t, epoch);
        }
        if (REMOTE == 1) tell_mover(a, s.remote, true, &told, epoch);
    }
}
