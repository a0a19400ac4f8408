// combine_recv, with flags in the data. Warps share out the pieces (four lines) of all tokens.
//
// Reads: own combine_row, route, num_dest, weight.  Writes: out.
#include "line.cuh"
#include "owed.cuh"

#define ROW_WORDS ((u32)(COMBINE_ROW_BYTES / 8))

// Rows of a token that are waited for together; two do not fit into 48 registers before sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PLACES_AT_ONCE 1u
#else
#define PLACES_AT_ONCE 2u
#endif

DEVICE Piece owed_piece(const Args& a, const Owed& owed, u32 t, u32 n, u32 number)
{
    Piece piece;
    piece.lines = combine_row(a.symmetric, a, t, owed.place[n]);
    piece.number = number;
    piece.words = ROW_WORDS;
    piece.who = from_rank(PHASE_COMBINE_RECV, owed.peer[n]);
    return piece;
}

DEVICE bool sum_piece(const Args& a, const Owed& owed, u32 t, u32 number, u64 epoch)
{
    typedef Row<COMBINE_DTYPE> Y;
    void* out = (void*)(a.out + t * a.out_stride);
    const u32 c = number * PIECE_CHUNKS + lane_id();
    const bool live = lane_id() < PIECE_CHUNKS && c < ROW_WORDS / 2;
    Sum<COMBINE_DTYPE> sum = Sum<COMBINE_DTYPE>::zero();
    if (a.accumulate && live) sum = Sum<COMBINE_DTYPE>::of(Y::load(out, c, a.out_aligned));
    for (u32 first = 0; first < owed.num; first += PLACES_AT_ONCE) {
        // Past the last row the last one again, which changes nothing.
        const auto pieces = [&](u32 i) {
            return owed_piece(a, owed, t, min(first + i, owed.num - 1), number);
        };
        LineRead reads[PLACES_AT_ONCE];
        UNROLL for (u32 i = 0; i < PLACES_AT_ONCE; ++i) reads[i] = pieces(i).read(epoch);
        if (!wait_pieces<PLACES_AT_ONCE>(a, pieces, epoch, reads)) return false;
        UNROLL for (u32 i = 0; i < PLACES_AT_ONCE; ++i) {
            if (first + i >= owed.num) continue;
            const Pair chunk = to_chunks(reads[i].v);
            sum.add(owed.weight[first + i], to_chunk(chunk.low, chunk.high));
        }
    }
    if (live) Y::store(out, c, sum.rounded(), a.out_aligned);
    return true;
}

DEVICE void receive_tokens(const Args& a, u32 tokens, u64 epoch)
{
    DYNAMIC_SHARED(Owed, spaces);
    Owed& owed = spaces[warp_id()];
    const u32 pieces = num_pieces(ROW_WORDS);
    const u32 tasks = tokens * pieces;
    for (u32 task = blockIdx.x * num_warps() + warp_id(); task < tasks;
         task += gridDim.x * num_warps()) {
        load_owed(a, owed, task / pieces);
        __syncwarp();
        if (!sum_piece(a, owed, task / pieces, task % pieces, epoch)) return;
        __syncwarp();  // nobody still reads this warp's space
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_recv_lines(Args a)
{
    let_next_kernel_start();
    const u32 tokens = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot));
    u64 epoch;
    if (__all_sync(FULL_WARP, begin_combine(a, &epoch))) receive_tokens(a, tokens, epoch);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for combine_send
}
