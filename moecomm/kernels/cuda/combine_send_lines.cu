// combine_send, with flags in the data. Warps share out the pieces (four lines) of all rows, one or two
// at a time.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, ack.
// Order: none but the lines' own.
#include "line.cuh"
#include "returned.cuh"

#define ROW_WORDS ((u32)(COMBINE_ROW_BYTES / 8))

// The lane's chunk of piece `piece` of row `row` of y.
DEVICE Chunk y_chunk(const Args& a, u64 row, u32 piece)
{
    const u32 c = piece * PIECE_CHUNKS + lane_id();
    if (lane_id() >= PIECE_CHUNKS || c >= ROW_WORDS / 2) return zero_chunk();
    return Row<COMBINE_DTYPE>::load((const void*)(a.y + row * a.y_stride), c, a.y_aligned);
}

DEVICE void y_chunks(const Args& a, u64 row, u32 first, Chunk* own)
{
    UNROLL for (u32 i = 0; i < MOST_PIECES; ++i)
        if (i < PIECES_AT_ONCE) own[i] = y_chunk(a, row, first + i);
}

DEVICE Chunk sum_chunk(const Args& a, const Returned& rec, u32 piece)
{
    const u32 c = piece * PIECE_CHUNKS + lane_id();
    if (lane_id() >= PIECE_CHUNKS || c >= ROW_WORDS / 2) return zero_chunk();
    return weighted_sum(a, rec, c);
}

// The lanes' chunks of one piece, to place n.
DEVICE void send_piece(const Args& a, const Returned& rec, u32 n, u32 piece, Chunk own, u64 epoch)
{
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

// Pieces first, first + 1 ... of what goes back for record j.
DEVICE void return_pieces(const Args& a, Returned& rec, u32 j, u32 first, u64 epoch)
{
    Chunk own[MOST_PIECES];
    // In the rank layout row j belongs to record j: no need to ask its meta first.
    if (LAYOUT == LAYOUT_RANK) y_chunks(a, j, first, own);
    load_returned(a, rec, j);
    __syncwarp();
    if (SENDER_REDUCES)
        UNROLL for (u32 i = 0; i < MOST_PIECES; ++i)
            if (i < PIECES_AT_ONCE) own[i] = sum_chunk(a, rec, first + i);
    const u32 rows = SENDER_REDUCES ? 1 : rec.num;
    for (u32 n = 0; n < rows; ++n) {
        if (!SENDER_REDUCES && LAYOUT != LAYOUT_RANK) y_chunks(a, rec.row[n], first, own);
        UNROLL for (u32 i = 0; i < MOST_PIECES; ++i)
            if (i < PIECES_AT_ONCE) send_piece(a, rec, n, first + i, own[i], epoch);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_send_lines(Args a)
{
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const u32 records = ld(local_at<u32>(a, LOC_NUM_RECORDS, a.slot));
    u64 epoch;
    const bool go = begin_combine(a, &epoch);
    acknowledge(a, epoch);
    if (!__all_sync(FULL_WARP, go)) return;

    DYNAMIC_SHARED(Returned, spaces);
    Returned& rec = spaces[warp_id()];
    const u32 units = num_units(ROW_WORDS);
    const u32 tasks = num_turns(records) * units;
    for (u32 task = blockIdx.x * num_warps() + warp_id(); task < tasks;
         task += gridDim.x * num_warps()) {
        const u32 j = record_in_turn(a, task / units, records);
        if (j >= records) continue;
        return_pieces(a, rec, j, task % units * (u32)PIECES_AT_ONCE, epoch);
        __syncwarp();  // nobody still reads this warp's space
    }
}
