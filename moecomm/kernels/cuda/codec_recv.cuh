// Rows on arrival, decoded by a codec while they are expanded: MoeConfig.decode_to.
#pragma once
#if DECODES
#include "codec.cuh"
#include "line.cuh"
#include "placement.cuh"

typedef Row<WIRE_DTYPE> WireRow;  // only the size of its elements counts
typedef Row<RECV_DTYPE> RecvRow;
#define CHUNKS_MADE (WireRow::kElems / RecvRow::kElems)  // of recv.x, from one on the wire

// Which of the record's scales chunk c of the wire's row has.
DEVICE u64 scale_of_chunk(u64 c) { return SCALE_BLOCK ? c * WireRow::kElems / SCALE_BLOCK : 0; }

// Chunk c of a record's row to every row of recv.x that gets a copy.
DEVICE void store_decoded(const Args& a, const RowPlan& plan, u64 c, const Chunk& chunk, float scale)
{
    UNROLL for (u32 n = 0; n < CHUNKS_MADE; ++n) {
        Chunk out = zero_chunk();
        UNROLL for (u32 i = 0; i < RecvRow::kElems; ++i) {
            const WireRow::Elem bits = get<WireRow::Elem>(chunk, n * RecvRow::kElems + i);
            set<RecvRow::Elem>(out, i, encode<RECV_DTYPE>(decode_bits(bits, scale)));
        }
        for (u32 i = 0; i < plan.num; ++i)
            RecvRow::store((void*)recv_row(a, plan.rows[i]), c * CHUNKS_MADE + n, out,
                           rows_aligned());
    }
}

// One warp, the flags' wire: the row of the record at `record`.
DEVICE void decode_record(const Args& a, const RowPlan& plan, u64 record)
{
    const u64 row = record + RECORD_ROW_OFF, num_chunks = WireRow::num_chunks();
    const float* scales = reinterpret_cast<const float*>(record + RECORD_SCALE_OFF);
    for (u64 c = lane_id(); c < num_chunks; c += WARP_SIZE) {
        const Chunk chunk = to_chunk(ld_v4((const void*)(row + c * 16)));
        const float scale = CODEC_SCALED ? ld(scales + scale_of_chunk(c)) : 1.0f;
        store_decoded(a, plan, c, chunk, scale);
    }
}

// ---- lines: a row's scales are in other pieces than the row -----------------------------------------
#define PIECE_BYTES (WARP_WORDS * 8u)
#define NO_PIECE 0xffffffffu

// Each lane gets the float at `byte` of the record's image; lanes without `wanted` only help. All
// lanes call it; false as in wait_piece.
DEVICE bool read_floats(const Args& a, Piece piece, u32 byte, bool wanted, u64 epoch, float* found)
{
    u32 number = wanted ? byte / PIECE_BYTES : NO_PIECE;
    const u32 lane = byte % PIECE_BYTES / 16;
    for (u32 mask; (mask = __ballot_sync(FULL_WARP, number != NO_PIECE)) != 0;) {
        piece.number = __shfl_sync(FULL_WARP, number, __ffs(mask) - 1);
        LineRead r = piece.read(epoch);
        if (!wait_piece(a, piece, epoch, r)) return false;
        const u64 word = traded(to_chunks(r.v), lane, byte / 8 % 2);
        if (number != piece.number) continue;
        *found = __uint_as_float((u32)(word >> 8 * (byte % 8)));
        number = NO_PIECE;
    }
    return true;
}

// One warp: chunk c (16 bytes) of the image, which this lane holds, decoded to every row that gets
// a copy; meta and scales go nowhere. False as in wait_piece.
DEVICE bool place_decoded(const Args& a, const Piece& own, const RowPlan& plan, u32 c, Pair chunk,
                          u64 epoch)
{
    const u64 byte = (u64)c * 16;
    const bool row = lane_id() < PIECE_CHUNKS && byte >= RECORD_ROW_OFF && byte < RECORD_SCALE_OFF;
    const u64 place = row ? (byte - RECORD_ROW_OFF) / 16 : 0;
    float scale = 1.0f;
    if (CODEC_SCALED) {
        const u32 at = (u32)(RECORD_SCALE_OFF + 4 * scale_of_chunk(place));
        if (!read_floats(a, own, at, row, epoch, &scale)) return false;
    }
    if (row) store_decoded(a, plan, place, to_chunk(chunk.low, chunk.high), scale);
    return true;
}
#endif
