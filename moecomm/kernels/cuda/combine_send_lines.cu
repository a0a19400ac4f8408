// combine_send, with flags in the data. Warps share out the pieces (four lines) of all rows.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, ack.
// Order: none but the lines' own.
#include "line.cuh"
#include "returned.cuh"

#define ROW_WORDS ((u32)(COMBINE_ROW_BYTES / 8))

// Word i of row `row` of y.
DEVICE u64 y_word(const Args& a, u64 row, u32 i)
{
    return load_word<COMBINE_DTYPE>((const void*)(a.y + row * a.y_stride), i, a.y_aligned);
}

// Word i of what goes back: a row as it is, or the weighted sum of all rows, in slot order.
DEVICE u64 returned_word(const Args& a, const Returned& rec, u32 n, u32 i)
{
    if (i >= ROW_WORDS) return 0;
    if (!SENDER_REDUCES) return y_word(a, rec.row[n], i);
    Floats<COMBINE_DTYPE> sum = Floats<COMBINE_DTYPE>::zero();
    for (u32 r = 0; r < rec.num; ++r) sum.add(rec.weight[r], y_word(a, rec.row[r], i));
    return sum.word();
}

DEVICE void send_piece(const Args& a, const Returned& rec, u32 n, u32 piece, u64 epoch)
{
    const u32 word = lane_word(piece);
    Pair v;
    v.low = returned_word(a, rec, n, word);
    v.high = holds_flag() ? epoch : returned_word(a, rec, n, word + 1);
    for (u32 d = 0; d < REPLICAS; ++d) {
        const u64 base = peer_base(a, rec.group * REPLICAS + d);
        const u64 lines = combine_row(base, a, rec.token, rec.place[n]);
        st_line(lane_address(lines, piece), v, lane_live(piece, ROW_WORDS));
    }
}

extern "C" __global__ void combine_send_lines(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;
    acknowledge(a, epoch);
    if (CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch) return;

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
