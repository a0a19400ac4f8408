// Rows on their way out: copied, cast to fp8, or encoded by a codec.
#pragma once
#include "dtype.cuh"
#include "waits.cuh"

#if INPUT_DTYPE != WIRE_DTYPE
// The columns of chunk c (16 bytes on the wire) of token t's row.
template <int D>
DEVICE void load_floats(const Args& a, u32 t, u64 c, float values[Row<WIRE_DTYPE>::kElems])
{
    typedef Row<D> In;
    const void* row = (const void*)(a.x + t * a.x_stride);
    const u32 chunks = Row<WIRE_DTYPE>::kElems / In::kElems;
    for (u32 i = 0; i < chunks; ++i) {
        Chunk chunk = In::load(row, c * chunks + i, a.x_aligned);
        for (u32 j = 0; j < In::kElems; ++j)
            values[i * In::kElems + j] = decode<D>(get<typename In::Elem>(chunk, j));
    }
}
#endif

#if CODEC
#include "codec_send.cuh"
#else

#if INPUT_DTYPE == WIRE_DTYPE
// Chunk c (16 bytes on the wire) of token t's row.
DEVICE Chunk wire_chunk(const Args& a, u32 t, u64 c, float*)
{
    return Row<WIRE_DTYPE>::load((const void*)(a.x + t * a.x_stride), c, a.x_aligned);
}

DEVICE float given_scale(const Args& a, u32 t, u64 block)
{
    return ld(reinterpret_cast<const float*>(a.x_scale + t * a.x_scale_row_stride +
                                             block * a.x_scale_col_stride));
}
#else
struct BlockScale {
    float scale;
    float inverse;
};

DEVICE BlockScale block_scale(float largest)
{
    BlockScale s;
    largest = fmaxf(largest, 1e-30f);  // an all-zero block gets a finite scale
    s.scale = __fdiv_rn(largest, 448.0f);
    s.inverse = __fdiv_rn(448.0f, largest);
    if (SCALE_POW2) {
        u32 bits = __float_as_uint(s.scale);
        bits = (bits + 0x7fffffu) & 0xff800000u;
        s.scale = __uint_as_float(bits);
        // Exponent negated; of an infinite scale 0, not -infinity.
        s.inverse = __uint_as_float((u32)max((i32)(0x7f000000u - bits), 0));
    }
    return s;
}

// Chunk c (16 columns as fp8) of token t's row; `scale` gets that of its block. All lanes of a warp
// call this for neighbouring chunks: the SCALE_BLOCK / 16 lanes of a block agree on its largest
// value. Past the end of the row a chunk is zero.
DEVICE Chunk wire_chunk(const Args& a, u32 t, u64 c, float* scale)
{
    float values[16];
    for (u32 i = 0; i < 16; ++i) values[i] = 0.0f;
    if (c < Row<WIRE_DTYPE>::num_chunks()) load_floats<INPUT_DTYPE>(a, t, c, values);
    float inverse = 1.0f;
    if (SCALE_BLOCK) {
        float largest = 0.0f;
        for (u32 i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(values[i]));
        for (u32 step = 1; step < SCALE_BLOCK / 16; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
        const BlockScale s = block_scale(largest);
        *scale = s.scale;
        inverse = s.inverse;
    }
    Chunk out = zero_chunk();
    for (u32 i = 0; i < 16; ++i) set<u8>(out, i, float_to_e4m3(__fmul_rn(values[i], inverse)));
    return out;
}
#endif

// Chunks that a thread has under way; a cast holds 16 floats for each.
#if INPUT_DTYPE == WIRE_DTYPE
#define CHUNKS_IN_HAND CHUNKS_AT_ONCE
#else
#define CHUNKS_IN_HAND 2u
#endif

// Makes token t's row and hands it out in pieces: row_chunk(c, chunk), row_scale(block, scale).
// `workers` warps take part; the caller is number `worker`.
template <class Sink>
DEVICE void make_row(const Args& a, u32 t, u32 worker, u32 workers, Sink& sink)
{
    const u64 num = Row<WIRE_DTYPE>::num_chunks(), stride = workers * WARP_SIZE;
    for (u64 base = worker * WARP_SIZE; base < num; base += CHUNKS_IN_HAND * stride) {
        Chunk chunks[CHUNKS_IN_HAND];
        float scales[CHUNKS_IN_HAND];
        UNROLL for (u32 n = 0; n < CHUNKS_IN_HAND; ++n)
            if (base + n * stride < num)
                chunks[n] = wire_chunk(a, t, base + n * stride + lane_id(), scales + n);
        UNROLL for (u32 n = 0; n < CHUNKS_IN_HAND; ++n) {
            const u64 c = base + n * stride + lane_id();
            if (c >= num) continue;
            sink.row_chunk(c, chunks[n]);
#if INPUT_DTYPE != WIRE_DTYPE
            if (SCALE_BLOCK && c * 16 % SCALE_BLOCK == 0)
                sink.row_scale(c * 16 / SCALE_BLOCK, scales[n]);
#endif
        }
    }
#if INPUT_DTYPE == WIRE_DTYPE
    for (u64 b = worker * WARP_SIZE + lane_id(); b < NUM_SCALES; b += stride)
        sink.row_scale(b, given_scale(a, t, b));
#endif
}

#endif  // CODEC
