// dispatch_recv: records of all groups  →  rows of recv.x, in (expert, group, token) order.
//
// Every block waits for all heads and works out where each group's rows of each expert begin
// (prefix sums over groups, then over experts). Then warps share out the records: wait for a
// record's flag, copy its row to every local expert that wants it. Block 0 also writes counts
// and offsets.
//
// Reads: own head, record, record_flag.  Writes: own received rows, meta, row_of, epoch.
// Order: acquire of a record's flag, warp barrier, its bytes.
#include "codec_recv.cuh"
#include "placement.cuh"

DEVICE void copy_record(const Args& a, const RowPlan& plan, u64 record)
{
    const u64 row = record + RECORD_ROW_OFF;
    const u64 num_chunks = Row<WIRE_DTYPE>::num_chunks();
    for (u64 c = lane_id(); c < num_chunks; c += CHUNKS_AT_ONCE * WARP_SIZE) {
        Chunk chunks[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * WARP_SIZE < num_chunks)
                chunks[n] = to_chunk(ld_v4((const void*)(row + (c + n * WARP_SIZE) * 16)));
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * WARP_SIZE < num_chunks)
                for (u32 i = 0; i < plan.num; ++i)
                    Row<WIRE_DTYPE>::store((void*)recv_row(a, plan.rows[i]), c + n * WARP_SIZE,
                                           chunks[n], rows_aligned());
    }
    const float* scales = reinterpret_cast<const float*>(record + RECORD_SCALE_OFF);
    for (u64 b = lane_id(); b < NUM_SCALES; b += WARP_SIZE) {
        const float scale = ld(scales + b);
        for (u32 i = 0; i < plan.num; ++i) st(recv_scale(a, plan.rows[i]) + b, scale);
    }
}

DEVICE void receive_record(const Args& a, const Placement& s, RowPlan& plan, u32 j, u32 group,
                           u64 record)
{
    plan_record(a, s, reinterpret_cast<const u32*>(record), j, group, true, plan);
    __syncwarp();
#if DECODES
    decode_record(a, plan, record);
#else
    copy_record(a, plan, record);
#endif
    __syncwarp();  // nobody still reads this warp's plan
}

// Each lane watches one of the warp's records; they are copied as they come.
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
                const u32 lane = (u32)__ffs(come) - 1, record = begin + lane * stride;
                const u32 from = __shfl_sync(FULL_WARP, group, lane);
                receive_record(a, s, plan, record, from,
                               record_at(a.symmetric, a, from, record - s.group_start[from]));
            }
        }
    }
}

// The same where some peers are remote: one record after the other.
DEVICE void receive_remote(const Args& a, const Placement& s, RowPlan& plan, u64 epoch)
{
    const u32 total = s.group_start[NUM_GROUPS];
    for (u32 j = row_block() * num_warps() + warp_id(); j < total;
         j += num_row_blocks() * num_warps()) {
        const u32 source = source_of(s, j), i = j - s.source_start[source];
        const bool remote = is_remote(a, source);
        bool ok = true;
        if (lane_id() == 0 && remote)
            ok = wait_arrived(a, source, record_channel(i), epoch, epoch, PHASE_DISPATCH_RECV);
        else if (lane_id() == 0)
            ok = wait_flag(a, record_flag(a.symmetric, a, source, i), epoch,
                           from_rank(PHASE_DISPATCH_RECV, source));
        if (!__all_sync(FULL_WARP, ok)) return;
        __syncwarp();  // what lane 0 acquired holds for all
        receive_record(a, s, plan, j, source / (u32)REPLICAS,
                       remote ? landed_record(a, source, i) : record_at(a.symmetric, a, source, i));
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
        if (REMOTE)
            receive_remote(a, s, plans[warp_id()], epoch);
        else
            receive_records(a, s, plans[warp_id()], epoch);
    }
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for dispatch_send
}
