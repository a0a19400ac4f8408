// combine_send: expert output rows  →  back to the rank(s) that hold the token.
//
// Blocks share out the received records. reduce="receiver": one row per (token, expert), to the
// place of its slot k. reduce="sender": the weighted fp32 sum over this rank's experts, rounded
// once, to the place of this rank. rank layout: the caller's row, to the place of this rank.
// Every replica of the source group gets a copy.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, combine_flag, ack.
// Order: a row's bytes, block barrier, release of its flag.
#include "returned.cuh"

DEVICE u64 dest_row(const Args& a, const Returned& rec, u32 replica, u32 i)
{
    const u64 base = peer_base(a, rec.group * REPLICAS + replica);
    return combine_row(base, a, rec.token, rec.place[i]);
}

// Each row as it is.
DEVICE void send_rows(const Args& a, const Returned& rec)
{
    const u64 chunks = Row<COMBINE_DTYPE>::num_chunks();
    for (u32 i = 0; i < rec.num; ++i) {
        const void* y = (const void*)(a.y + rec.row[i] * a.y_stride);
        for (u64 c = threadIdx.x; c < chunks; c += blockDim.x) {
            const Chunk chunk = Row<COMBINE_DTYPE>::load(y, c, a.y_aligned);
            for (u32 d = 0; d < REPLICAS; ++d) st_v4((void*)(dest_row(a, rec, d, i) + c * 16), to_v4(chunk));
        }
    }
}

// One row: the weighted sum, in slot order.
DEVICE void send_sum(const Args& a, const Returned& rec)
{
    typedef Row<COMBINE_DTYPE> Y;
    for (u64 c = threadIdx.x; c < Y::num_chunks(); c += blockDim.x) {
        float sum[Y::kElems];
        for (u32 e = 0; e < Y::kElems; ++e) sum[e] = 0.0f;
        for (u32 i = 0; i < rec.num; ++i) {
            Chunk y = Y::load((const void*)(a.y + rec.row[i] * a.y_stride), c, a.y_aligned);
            for (u32 e = 0; e < Y::kElems; ++e)
                sum[e] = __fadd_rn(
                    sum[e],
                    __fmul_rn(rec.weight[i], decode<COMBINE_DTYPE>(get<Y::Elem>(y, e))));
        }
        Chunk out = zero_chunk();
        for (u32 e = 0; e < Y::kElems; ++e) set<Y::Elem>(out, e, encode<COMBINE_DTYPE>(sum[e]));
        for (u32 d = 0; d < REPLICAS; ++d) st_v4((void*)(dest_row(a, rec, d, 0) + c * 16), to_v4(out));
    }
}

extern "C" __global__ void combine_send(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;
    acknowledge(a, epoch);
    if (CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch) return;

    DYNAMIC_SHARED(Returned, record);
    const u32 total = ld(local_at<u32>(a, LOC_NUM_RECORDS, a.slot));
    for (u32 j = blockIdx.x; j < total; j += gridDim.x) {
        if (warp_id() == 0) load_returned(a, *record, j);
        __syncthreads();
        if (SENDER_REDUCES)
            send_sum(a, *record);
        else
            send_rows(a, *record);
        __syncthreads();  // every thread's part of a row comes before its flag
        const u32 rows = SENDER_REDUCES ? 1 : record->num;
        for (u32 i = threadIdx.x; i < rows * REPLICAS; i += blockDim.x) {
            const u64 base = peer_base(a, record->group * REPLICAS + i % REPLICAS);
            st_release_sys(combine_flag(base, a, record->token, record->place[i / REPLICAS]), epoch);
        }
        __syncthreads();  // nobody still reads this record
    }
}
