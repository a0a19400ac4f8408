// combine_recv: out[t] = sum over places of (weight *) returned row, in fp32, rounded once.
//
// Warps share out this rank's tokens; each waits for exactly the rows its token is owed, which
// the routing kept by dispatch_send tells. Places count slots k (reduce="receiver": weighted
// here) or destination ranks in ascending order (already weighted).
//
// Reads: own combine_row, combine_flag, route, num_dest, weight.  Writes: out.
// Order: acquire of a row's flag, warp barrier, its bytes.
#include "owed.cuh"

DEVICE bool rows_arrived(const Args& a, const Owed& owed, u32 t, u64 epoch)
{
    bool ok = true;
    if (lane_id() < owed.num)
        ok = owed_arrived(a, owed, t, lane_id(), epoch);
    const bool all = __all_sync(FULL_WARP, ok);
    __syncwarp();  // what one lane acquired holds for all
    return all;
}

#define ROWS_AT_ONCE 4u  // independent loads under way in one thread

DEVICE void sum_rows(const Args& a, const Owed& owed, u32 t)
{
    typedef Row<COMBINE_DTYPE> Y;
    void* out = (void*)(a.out + t * a.out_stride);
    for (u64 c = lane_id(); c < Y::num_chunks(); c += WARP_SIZE) {
        Sum<COMBINE_DTYPE> sum = Sum<COMBINE_DTYPE>::zero();
        if (a.accumulate) sum = Sum<COMBINE_DTYPE>::of(Y::load(out, c, a.out_aligned));
        for (u32 first = 0; first < owed.num; first += ROWS_AT_ONCE) {
            Chunk y[ROWS_AT_ONCE];
            for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
                if (first + i < owed.num)
                    y[i] = to_chunk(ld_v4((const void*)(owed_row(a, owed, t, first + i) + c * 16)));
            for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
                if (first + i < owed.num) sum.add(owed.weight[first + i], y[i]);
        }
        Y::store(out, c, sum.rounded(), a.out_aligned);
    }
}

DEVICE void receive_tokens(const Args& a, u32 tokens, u64 epoch)
{
    DYNAMIC_SHARED(Owed, spaces);
    Owed& owed = spaces[warp_id()];
    for (u32 t = blockIdx.x * num_warps() + warp_id(); t < tokens; t += gridDim.x * num_warps()) {
        load_owed(a, owed, t);
        __syncwarp();
        if (!rows_arrived(a, owed, t, epoch)) return;
        sum_rows(a, owed, t);
        __syncwarp();  // nobody still reads this warp's space
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_recv(Args a)
{
    const u32 tokens = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot));
    u64 epoch;
    if (__all_sync(FULL_WARP, begin_combine(a, &epoch))) receive_tokens(a, tokens, epoch);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for combine_send
}
