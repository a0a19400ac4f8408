// dispatch_recv: records of all groups  →  rows of recv.x, in (expert, group, token) order.
//
// Every block waits for all heads and works out where each group's rows of each expert begin
// (prefix sums over groups, then over experts). Then blocks share out the records: wait for a
// record's flag, copy its row to every local expert that wants it. Block 0 also writes counts
// and offsets.
//
// Reads: own head, record, record_flag.  Writes: own received rows, meta, row_of, epoch.
// Order: acquire of a record's flag, block barrier, its bytes.
#include "placement.cuh"

DEVICE void copy_record(const Args& a, const RowPlan& plan, u64 record)
{
    const u64 row = record + RECORD_ROW_OFF;
    for (u64 c = threadIdx.x; c < Row<WIRE_DTYPE>::num_chunks(); c += blockDim.x) {
        const Chunk chunk = to_chunk(ld_v4((const void*)(row + c * 16)));
        for (u32 i = 0; i < plan.num; ++i)
            Row<WIRE_DTYPE>::store((void*)recv_row(a, plan.rows[i]), c, chunk, rows_aligned());
    }
    const float* scales = reinterpret_cast<const float*>(record + RECORD_SCALE_OFF);
    for (u64 b = threadIdx.x; b < NUM_SCALES; b += blockDim.x) {
        const float scale = ld(scales + b);
        for (u32 i = 0; i < plan.num; ++i) st(recv_scale(a, plan.rows[i]) + b, scale);
    }
}

DEVICE void receive_records(const Args& a, const Placement& s, RowPlan& plan, u64 epoch)
{
    const u32 total = s.group_start[NUM_GROUPS];
    for (u32 j = blockIdx.x; j < total; j += gridDim.x) {
        const u32 group = group_of(s, j);
        const u32 i = j - s.group_start[group];
        bool ok = true;
        if (threadIdx.x == 0)
            ok = wait_for(a, record_flag(a.symmetric, a, group, i), FlagReached{epoch}, epoch, epoch,
                          PHASE_DISPATCH_RECV, group * (u32)REPLICAS);
        if (!__syncthreads_and(ok)) return;
        const u64 record = record_at(a.symmetric, a, group, i);
        if (warp_id() == 0)
            plan_record(a, s, reinterpret_cast<const u32*>(record), j, group, true, plan);
        __syncthreads();
        copy_record(a, plan, record);
        __syncthreads();  // nobody still reads the plan
    }
}

extern "C" __global__ void dispatch_recv(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;

    DYNAMIC_SHARED(u32, words);
    RowPlan& plan = *reinterpret_cast<RowPlan*>(words);
    const Placement s = placement_at(a, words + sizeof(RowPlan) / sizeof(u32));
    if (place_rows(a, s, epoch) == Step::receive) receive_records(a, s, plan, epoch);
}
