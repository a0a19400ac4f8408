// combine_send, with flags in the data. Warps share out the pieces (four lines) of all rows.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, ack.
// Order: none but the lines' own.
#include "line.cuh"
#include "returned.cuh"

#define ROW_WORDS ((u32)(COMBINE_ROW_BYTES / 8))

// Chunk c of what goes back to place n.
DEVICE Chunk returned_chunk(const Args& a, const Returned& rec, u32 n, u32 c)
{
    if (c >= ROW_WORDS / 2) return zero_chunk();
    if (SENDER_REDUCES) return weighted_sum(a, rec, c);
    return Row<COMBINE_DTYPE>::load((const void*)(a.y + rec.row[n] * a.y_stride), c, a.y_aligned);
}

DEVICE void send_piece(const Args& a, const Returned& rec, u32 n, u32 piece, u64 epoch)
{
    Chunk own = zero_chunk();
    if (lane_id() < PIECE_CHUNKS) own = returned_chunk(a, rec, n, piece * PIECE_CHUNKS + lane_id());
    Pair chunk;
    chunk.low = (u64)own.words[1] << 32 | own.words[0];
    chunk.high = (u64)own.words[3] << 32 | own.words[2];
    const Pair v = to_lines(chunk, epoch);
    for (u32 d = 0; d < REPLICAS; ++d) {
        const u64 base = peer_base(a, rec.group * REPLICAS + d);
        const u64 lines = combine_row(base, a, rec.token, rec.place[n]);
        st_line(lane_address(lines, piece), v, lane_live(piece, ROW_WORDS));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_send_lines(Args a)
{
    wait_for_earlier_kernels();
    let_next_kernel_start();
    u64 epoch;
    const bool go = begin_combine(a, &epoch);
    acknowledge(a, epoch);
    if (!__all_sync(FULL_WARP, go)) return;

    DYNAMIC_SHARED(Returned, spaces);
    Returned& rec = spaces[warp_id()];
    const u32 pieces = num_pieces(ROW_WORDS);
    const u32 tasks = ld(local_at<u32>(a, LOC_NUM_RECORDS, a.slot)) * pieces;
    for (u32 task = blockIdx.x * num_warps() + warp_id(); task < tasks;
         task += gridDim.x * num_warps()) {
        load_returned(a, rec, task / pieces);
        __syncwarp();
        const u32 rows = SENDER_REDUCES ? 1 : rec.num;
        for (u32 n = 0; n < rows; ++n) send_piece(a, rec, n, task % pieces, epoch);
        __syncwarp();  // nobody still reads this warp's space
    }
}
