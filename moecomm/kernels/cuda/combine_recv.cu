// combine_recv: out[t] = sum over places of (weight *) returned row, in fp32, rounded once.
//
// Blocks share out this rank's tokens; each waits for exactly the rows its token is owed, which
// the routing kept by dispatch_send tells. Places count slots k (reduce="receiver": weighted
// here) or destination ranks in ascending order (already weighted).
//
// Reads: own combine_row, combine_flag, route, num_dest, weight.  Writes: out.
// Order: acquire of a row's flag, block barrier, its bytes.
#include "owed.cuh"

DEVICE bool rows_arrived(const Args& a, const Owed& owed, u32 t, u64 epoch)
{
    bool ok = true;
    if (threadIdx.x < owed.num)
        ok = wait_for(a, combine_flag(a.symmetric, a, t, owed.place[threadIdx.x]), FlagReached{epoch},
                      epoch, epoch, PHASE_COMBINE_RECV, owed.peer[threadIdx.x]);
    return __syncthreads_and(ok);
}

DEVICE void sum_rows(const Args& a, const Owed& owed, u32 t)
{
    typedef Row<COMBINE_DTYPE> Y;
    void* out = (void*)(a.out + t * a.out_stride);
    for (u64 c = threadIdx.x; c < Y::num_chunks(); c += blockDim.x) {
        float sum[Y::kElems];
        Chunk chunk = zero_chunk();
        if (a.accumulate) chunk = Y::load(out, c, a.out_aligned);
        for (u32 e = 0; e < Y::kElems; ++e)
            sum[e] = a.accumulate ? decode<COMBINE_DTYPE>(get<Y::Elem>(chunk, e)) : 0.0f;
        for (u32 i = 0; i < owed.num; ++i) {
            chunk = to_chunk(ld_v4((const void*)(combine_row(a.symmetric, a, t, owed.place[i]) + c * 16)));
            for (u32 e = 0; e < Y::kElems; ++e) {
                const float y = decode<COMBINE_DTYPE>(get<Y::Elem>(chunk, e));
                sum[e] = __fadd_rn(sum[e], __fmul_rn(owed.weight[i], y));  // weight 1 is exact
            }
        }
        chunk = zero_chunk();
        for (u32 e = 0; e < Y::kElems; ++e) set<Y::Elem>(chunk, e, encode<COMBINE_DTYPE>(sum[e]));
        Y::store(out, c, chunk, a.out_aligned);
    }
}

extern "C" __global__ void combine_recv(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;
    if (CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch) return;

    DYNAMIC_SHARED(Owed, owed);
    const u32 tokens = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot));
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        if (warp_id() == 0) load_owed(a, *owed, t);
        __syncthreads();
        if (!rows_arrived(a, *owed, t, epoch)) return;
        sum_rows(a, *owed, t);
        __syncthreads();  // nobody still reads this token
    }
}
