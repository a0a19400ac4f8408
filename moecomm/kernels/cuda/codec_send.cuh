// Rows on their way out, encoded by a codec. Part of wire_row.cuh.
#pragma once
#include "codec.cuh"

typedef Row<WIRE_DTYPE> WireRow;  // only the size of its elements counts

struct Columns {  // of one chunk on the wire
    float values[WireRow::kElems];
};

// Chunk c's columns; past the end of the row they are zero.
DEVICE Columns load_columns(const Args& a, u32 t, u64 c)
{
    Columns columns;
    for (u32 i = 0; i < WireRow::kElems; ++i) columns.values[i] = 0.0f;
    if (c >= WireRow::num_chunks()) return columns;
#ifdef CODEC_INPUT  // the emulator: one compile for all inputs
    if (CODEC_INPUT == DTYPE_F32) load_floats<DTYPE_F32>(a, t, c, columns.values);
    if (CODEC_INPUT == DTYPE_F16) load_floats<DTYPE_F16>(a, t, c, columns.values);
    if (CODEC_INPUT == DTYPE_BF16) load_floats<DTYPE_BF16>(a, t, c, columns.values);
#else
    load_floats<INPUT_DTYPE>(a, t, c, columns.values);
#endif
    return columns;
}

DEVICE float larger(float largest, const Columns& columns)
{
    for (u32 i = 0; i < WireRow::kElems; ++i) largest = fmaxf(largest, fabsf(columns.values[i]));
    return largest;
}

// The largest of `lanes` neighbouring lanes, a power of two.
DEVICE float largest_of_lanes(float largest, u32 lanes)
{
    for (u32 step = 1; step < lanes; step *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    return largest;
}

// The largest of all threads of the block. The caller has a barrier between two rows.
DEVICE float largest_of_block(float largest)
{
    DYNAMIC_SHARED(u8, shared);
    float* warps = reinterpret_cast<float*>(shared + CODEC_SHARED_OFF);  // [num_warps]
    largest = largest_of_lanes(largest, WARP_SIZE);
    if (lane_id() == 0) warps[warp_id()] = largest;
    __syncthreads();  // every warp has said what it found
    return largest_of_lanes(lane_id() < num_warps() ? warps[lane_id()] : 0.0f, WARP_SIZE);
}

// One scale a token: the row is read twice, but for each thread's first chunk, which stays where
// it is. (With lines a row of 7168 columns has less than two chunks a thread.)
DEVICE float largest_of_row(const Args& a, u32 t, u64 first, u32 workers, const Columns& kept)
{
    float largest = larger(0.0f, kept);
    const u32 stride = workers * WARP_SIZE;
    for (u64 c = first + stride; c < WireRow::num_chunks(); c += stride)
        largest = larger(largest, load_columns(a, t, c));
    return workers == 1 ? largest_of_lanes(largest, WARP_SIZE) : largest_of_block(largest);
}

// A block's first chunk brings its scale; without blocks the row is one.
DEVICE u64 block_of(u64 c) { return SCALE_BLOCK ? c * WireRow::kElems / SCALE_BLOCK : 0; }
DEVICE bool begins_block(u64 c) { return c == 0 || block_of(c) != block_of(c - 1); }

DEVICE Chunk encoded(const Columns& columns, float factor)
{
    Chunk out = zero_chunk();
    for (u32 i = 0; i < WireRow::kElems; ++i)
        set<WireRow::Elem>(out, i, (WireRow::Elem)call_encode(columns.values[i], factor));
    return out;
}

// Makes token t's row and hands it out in pieces: row_chunk(c, chunk), row_scale(block, scale).
// `workers` warps take part, one or all of the block; the caller is number `worker`.
template <class Sink>
DEVICE void make_row(const Args& a, u32 t, u32 worker, u32 workers, Sink& sink)
{
    const u64 chunks = WireRow::num_chunks();
    u64 c = worker * WARP_SIZE + lane_id();
    Columns columns = load_columns(a, t, c);
    CodecScale s = {1.0f, 1.0f};
    if (CODEC_SCALED && !SCALE_BLOCK) s = codec_scale_of(largest_of_row(a, t, c, workers, columns));
    while (c - lane_id() < chunks) {  // whole warps
        if (SCALE_BLOCK) {
            const u32 lanes = SCALE_BLOCK / WireRow::kElems;
            s = codec_scale_of(largest_of_lanes(larger(0.0f, columns), lanes));
        }
        if (CODEC_SCALED && c < chunks && begins_block(c)) sink.row_scale(block_of(c), s.scale);
        if (c < chunks) sink.row_chunk(c, encoded(columns, s.factor));
        c += workers * WARP_SIZE;
        columns = load_columns(a, t, c);
    }
}
