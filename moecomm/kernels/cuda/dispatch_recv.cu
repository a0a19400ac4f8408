// dispatch_recv: records of all groups  →  rows of recv.x, in (expert, group, token) order.
//
// Every block waits for all heads and works out where each group's rows of each expert begin
// (prefix sums over groups, then over experts). Then teams share out the records: wait for a
// record's flag, copy its row to every local expert that wants it. Block 0 also writes counts
// and offsets.
//
// Reads: own head, record, record_flag.  Writes: own received rows, meta, row_of, epoch.
// Order: acquire of a record's flag, the team's barrier, its bytes.
#include "codec_recv.cuh"
#include "placement.cuh"
#include "team.cuh"

DEVICE void copy_record(const Args& a, const RowPlan& plan, u64 record)
{
    const u64 row = record + RECORD_ROW_OFF;
    const u64 num_chunks = Row<WIRE_DTYPE>::num_chunks();
    const u32 step = team_threads();
    for (u64 c = team_thread(); c < num_chunks; c += CHUNKS_AT_ONCE * step) {
        Chunk chunks[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * step < num_chunks)
                chunks[n] = to_chunk(ld_v4((const void*)(row + (c + n * step) * 16)));
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * step < num_chunks)
                for (u32 i = 0; i < plan.num; ++i)
                    Row<WIRE_DTYPE>::store((void*)recv_row(a, plan.rows[i]), c + n * step,
                                           chunks[n], rows_aligned());
    }
    const float* scales = reinterpret_cast<const float*>(record + RECORD_SCALE_OFF);
    for (u64 b = team_thread(); b < NUM_SCALES; b += step) {
        const float scale = ld(scales + b);
        for (u32 i = 0; i < plan.num; ++i) st(recv_scale(a, plan.rows[i]) + b, scale);
    }
}

DEVICE void plan_rows(const Args& a, const Placement& s, u32 j, u32 group, u64 record, RowPlan& plan)
{
    plan_record(a, s, reinterpret_cast<const u32*>(record), j, group, true, plan);
}

// One team, behind a barrier that makes the plan whole.
DEVICE void place_record(const Args& a, const RowPlan& plan, u64 record)
{
#if DECODES
    decode_record(a, plan, record);
#else
    copy_record(a, plan, record);
#endif
    team_sync();  // nobody still reads this team's plan
}

// Teams are warps: each lane watches one of the warp's records; they are copied as they come.
DEVICE void receive_records(const Args& a, const Placement& s, RowPlan& plan, u64 epoch)
{
    const u32 total = s.group_start[NUM_GROUPS], stride = num_row_blocks() * num_warps();
    for (u32 begin = row_block() * num_warps() + warp_id(); begin < total;
         begin += WARP_SIZE * stride) {
        const u32 j = begin + lane_id() * stride;
        const u32 group = j < total ? group_of(s, j) : 0;
        const u64* flag = record_flag(a.symmetric, a, group, j - s.group_start[group]);
        u32 missing = __ballot_sync(FULL_WARP, j < total);
        while (missing) {
            u32 come = wait_any(a, flag, missing >> lane_id() & 1, epoch,
                                from_group(PHASE_DISPATCH_RECV, group));
            if (!come) return;
            missing &= ~come;
            __syncwarp();  // what one lane acquired holds for all
            for (; come; come &= come - 1) {
                const u32 lane = (u32)__ffs(come) - 1, number = begin + lane * stride;
                const u32 from = __shfl_sync(FULL_WARP, group, lane);
                const u64 record = record_at(a.symmetric, a, from, number - s.group_start[from]);
                plan_rows(a, s, number, from, record, plan);
                __syncwarp();  // the plan is made
                place_record(a, plan, record);
            }
        }
    }
}

// One warp: record i of `source`, a rank or, without remote peers, a group, has arrived. False as in
// wait_for.
DEVICE bool record_arrived(const Args& a, u32 source, u32 i, u64 epoch)
{
    const Awaited who = REMOTE ? from_rank(PHASE_DISPATCH_RECV, source)
                               : from_group(PHASE_DISPATCH_RECV, source);
    bool ok = true;
    if (lane_id() == 0)
        ok = is_remote(a, source)
                 ? wait_arrived(a, source, record_channel(i), epoch, epoch, PHASE_DISPATCH_RECV)
                 : wait_flag(a, record_flag(a.symmetric, a, source, i), epoch, who);
    ok = __all_sync(FULL_WARP, ok);
    __syncwarp();  // what lane 0 acquired holds for all
    return ok;
}

// Where some peers are remote, or teams are blocks: one record after the other.
DEVICE void receive_in_order(const Args& a, const Placement& s, RowPlan& plan, u64 epoch)
{
    const u32 total = s.group_start[NUM_GROUPS];
    for (u32 j = row_block() * num_teams() + team_id(); j < total;
         j += num_row_blocks() * num_teams()) {
        const u32 source = source_of(s, j);  // a rank or, without remote peers, a group
        const u32 i = j - (REMOTE ? s.source_start : s.group_start)[source];
        const u64 record = is_remote(a, source) ? landed_record(a, source, i)
                                                : record_at(a.symmetric, a, source, i);
        bool ok = true;
        if (leads_team()) {
            ok = record_arrived(a, source, i, epoch);
            if (ok) plan_rows(a, s, j, REMOTE ? source / (u32)REPLICAS : source, record, plan);
        }
        if (!team_all(ok)) return;  // a barrier, too: the plan is made
        place_record(a, plan, record);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_recv(Args a)
{
    u64 epoch;
    let_next_kernel_start();
    if (!begin_recv(a, &epoch)) return;
    DYNAMIC_SHARED(RowPlan, plans);
    const Placement s = placement_at(a, reinterpret_cast<u32*>(plans + num_warps()));
    if (place_rows(a, s, epoch)) {
        if (REMOTE || BLOCK_PER_ROW)
            receive_in_order(a, s, plans[team_id()], epoch);
        else
            receive_records(a, s, plans[warp_id()], epoch);
    }
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for dispatch_send
}
