// dispatch_send: row of token t  →  record on every rank that hosts one of its experts.
//
// One copy per destination rank. A record lands at place i of (slot, source group), i counting
// the group's tokens for that rank; its meta says which local experts want the row and which
// place it has among the group's rows of each. All places follow from (token, slot k) order by
// counting, so they are the same in every run, and no rank asks another.
//
// Block 0 counts everything and tells every rank its numbers ("head"). The other blocks take a
// contiguous share of tokens each: count what comes before it, then each team sends a token. With
// replicas every one of them counts all tokens and sends those with t % REPLICAS == its number.
//
// Writes: peers' head, record, record_flag; own route, num_dest, weight, num_tokens, epoch.
// Order: a record's bytes, the team's barrier, release of its flag. Heads carry their epoch in the
// word; the first is released, since it also says that older combine rows have been read.
#include "routing.cuh"
#include "team.cuh"
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
    for (u32 i = team_thread(); i < plan.num_dest * chunks; i += team_threads()) {
        const u32 d = i / chunks, c = i % chunks;
        uint4 v;
        v.x = meta_word(a, plan, t, d, 4 * c);
        v.y = meta_word(a, plan, t, d, 4 * c + 1);
        v.z = meta_word(a, plan, t, d, 4 * c + 2);
        v.w = meta_word(a, plan, t, d, 4 * c + 3);
        st_v4((void*)(plan.record[d] + c * 16), v);
    }
}

DEVICE void send_token(const Args& a, const Plan& plan, u32 t, u64 epoch)
{
    ToRecords records = {plan};
    make_row(a, t, BLOCK_PER_ROW ? warp_id() : 0, BLOCK_PER_ROW ? num_warps() : 1, records);
    send_meta(a, plan, t);
    if (REMOTE) clear_tails(plan);
    team_sync();  // every thread's part of the records comes before their flags
    const u32 d = team_thread();
    if (d < plan.num_dest && (!REMOTE || plan.flag[d])) st_release_sys(plan.flag[d], epoch);
}

// A team a token, as many at a time as the block has teams. Where a token goes also depends on those
// that other teams have in hand.
DEVICE void send_tokens(const Args& a, const Counters& s, Share share, const SendState& state,
                        u64 epoch)
{
    const u32 n = team_id();
    bool told = false;
    for (u32 first = share.first; first < share.last; first += num_teams()) {
        const u32 t = first + n;
        const bool live = t < share.last, more = first + num_teams() < share.last;
        const bool plans = live && leads_team();
        if (plans) plan_token(a, t, load_slot(a, t), s.plans[n]);
        // A barrier: the plans are made, and what comes before them is counted.
        if (!may_send(a, state, epoch)) return;
        if (plans) place_token(a, s, t, n);
        if (more || REMOTE || BLOCK_PER_ROW) {
            __syncthreads();  // all are placed: nobody still reads counters or others' plans
            if (plans) count_planned(a, s, t, s.plans[n]);
        }
        if (live && is_ours(a, t)) send_token(a, s.plans[n], t, epoch);
        if (REMOTE || (more && BLOCK_PER_ROW)) __syncthreads();  // all are packed, plans are free
        if (REMOTE == 1) tell_mover(a, s.remote, false, &told, epoch);
        if (REMOTE == 2)
            put_packed(a, s.remote, s.plans, first, min(share.last - first, num_teams()), epoch);
    }
    if (REMOTE == 1) tell_mover(a, s.remote, true, &told, epoch);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_send(Args a)
{
    DYNAMIC_SHARED(u32, words);
    const Counters s = counters_at(words, num_teams());
    u64 epoch;
    const SendState state = begin_send(a, s, &epoch);
    const u32 tokens = token_count(a);
    if (is_divided(tokens) && is_row_block()) publish_counts(a, s, tokens, epoch);
    const Share share = token_share(tokens);
    if (!count_before(a, s, blockIdx.x == 0 ? tokens : share.first, tokens, epoch)) return;
    if (blockIdx.x == 0 && !announce(a, s, tokens, state, epoch)) return;
    if (!is_row_block()) return;
    if (REMOTE) plan_staging(a, s.remote, share.first, tokens);
    send_tokens(a, s, share, state, epoch);
}
