// combine_recv, with flags in the data. Warps share out the pieces (four lines) of all tokens.
//
// Reads: own combine_row, route, num_dest, weight.  Writes: out.
#include "line.cuh"
#include "owed.cuh"

#define ROW_WORDS ((u32)(COMBINE_ROW_BYTES / 8))

DEVICE Floats<COMBINE_DTYPE> start_word(const Args& a, u32 t, u32 i)
{
    if (!a.accumulate || i >= ROW_WORDS) return Floats<COMBINE_DTYPE>::zero();
    const void* out = (const void*)(a.out + t * a.out_stride);
    return Floats<COMBINE_DTYPE>::of(load_word<COMBINE_DTYPE>(out, i, a.out_aligned));
}

DEVICE void finish_word(const Args& a, u32 t, u32 i, const Floats<COMBINE_DTYPE>& sum)
{
    void* out = (void*)(a.out + t * a.out_stride);
    if (i < ROW_WORDS) store_word<COMBINE_DTYPE>(out, i, sum.word(), a.out_aligned);
}

DEVICE bool sum_piece(const Args& a, const Owed& owed, u32 t, u32 piece, u64 epoch)
{
    const u32 word = lane_word(piece);
    Floats<COMBINE_DTYPE> low = start_word(a, t, word), high = start_word(a, t, word + 1);
    for (u32 n = 0; n < owed.num; ++n) {
        const u64 lines = combine_row(a.symmetric, a, t, owed.place[n]);
        Pair v;
        v.low = v.high = 0;
        if (!wait_line(a, lines, piece, ROW_WORDS, epoch, PHASE_COMBINE_RECV, owed.peer[n], &v))
            return false;
        low.add(owed.weight[n], v.low);
        high.add(owed.weight[n], v.high);
    }
    finish_word(a, t, word, low);
    if (!holds_flag()) finish_word(a, t, word + 1, high);
    return true;
}

extern "C" __global__ void combine_recv_lines(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;
    if (CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch) return;

    DYNAMIC_SHARED(Owed, spaces);
    Owed& owed = spaces[warp_id()];
    const u32 pieces = num_pieces(ROW_WORDS);
    const u32 tasks = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot)) * pieces;
    for (u32 task = blockIdx.x * num_warps() + warp_id(); task < tasks;
         task += gridDim.x * num_warps()) {
        load_owed(a, owed, task / pieces);
        __syncwarp();
        if (!sum_piece(a, owed, task / pieces, task % pieces, epoch)) return;
        __syncwarp();  // nobody still reads this warp's space
    }
}
