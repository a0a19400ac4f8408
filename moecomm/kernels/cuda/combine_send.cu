// combine_send: expert output rows  →  back to the rank(s) that hold the token.
//
// Warps share out the received records. reduce="receiver": one row per (token, expert), to the
// place of its slot k. reduce="sender": the weighted fp32 sum over this rank's experts, rounded
// once, to the place of this rank. rank layout: the caller's row, to the place of this rank.
// Every replica of the source group gets a copy.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, combine_flag, ack.
// Order: a row's bytes, warp barrier, release of its flag.
#include "returned.cuh"

DEVICE u64 dest_row(const Args& a, const Returned& rec, u32 replica, u32 i)
{
    const u64 base = peer_base(a, rec.group * REPLICAS + replica);
    return combine_row(base, a, rec.token, rec.place[i]);
}

// Each row as it is.
DEVICE void send_rows(const Args& a, const Returned& rec)
{
    typedef Row<COMBINE_DTYPE> Y;
    for (u32 i = 0; i < rec.num; ++i) {
        const void* y = (const void*)(a.y + rec.row[i] * a.y_stride);
        for (u64 c = lane_id(); c < Y::num_chunks(); c += CHUNKS_AT_ONCE * WARP_SIZE) {
            Chunk chunks[CHUNKS_AT_ONCE];
            UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
                if (c + n * WARP_SIZE < Y::num_chunks())
                    chunks[n] = Y::load(y, c + n * WARP_SIZE, a.y_aligned);
            UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
                if (c + n * WARP_SIZE < Y::num_chunks())
                    for (u32 d = 0; d < REPLICAS; ++d)
                        st_v4((void*)(dest_row(a, rec, d, i) + (c + n * WARP_SIZE) * 16),
                              to_v4(chunks[n]));
        }
    }
}

// One row: the weighted sum.
DEVICE void send_sum(const Args& a, const Returned& rec)
{
    for (u64 c = lane_id(); c < Row<COMBINE_DTYPE>::num_chunks(); c += WARP_SIZE) {
        const uint4 v = to_v4(weighted_sum(a, rec, c));
        for (u32 d = 0; d < REPLICAS; ++d) st_v4((void*)(dest_row(a, rec, d, 0) + c * 16), v);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_send(Args a)
{
    wait_for_earlier_kernels();
    let_next_kernel_start();
    u64 epoch;
    const bool go = begin_combine(a, &epoch);
    acknowledge(a, epoch);
    if (!__all_sync(FULL_WARP, go)) return;

    DYNAMIC_SHARED(Returned, spaces);
    Returned& rec = spaces[warp_id()];
    const u32 records = ld(local_at<u32>(a, LOC_NUM_RECORDS, a.slot));
    for (u32 j = blockIdx.x * num_warps() + warp_id(); j < records; j += gridDim.x * num_warps()) {
        load_returned(a, rec, j);
        __syncwarp();
        if (SENDER_REDUCES)
            send_sum(a, rec);
        else
            send_rows(a, rec);
        __syncwarp();  // every lane's part of a row comes before its flag
        const u32 rows = SENDER_REDUCES ? 1 : rec.num;
        for (u32 i = lane_id(); i < rows * REPLICAS; i += WARP_SIZE) {
            const u64 base = peer_base(a, rec.group * REPLICAS + i % REPLICAS);
            st_release_sys(combine_flag(base, a, rec.token, rec.place[i / REPLICAS]), epoch);
        }
        __syncwarp();  // nobody still reads this warp's space
    }
}
