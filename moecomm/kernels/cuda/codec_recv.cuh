// Rows on arrival, decoded by a codec while they are expanded: MoeConfig.decode_to.
#pragma once
#if DECODES
#include "codec.cuh"
#include "line.cuh"
#include "placement.cuh"
#include "team.cuh"

typedef Row<WIRE_DTYPE> WireRow;  // only the size of its elements counts
typedef Row<RECV_DTYPE> RecvRow;
#define CHUNKS_MADE (WireRow::kElems / RecvRow::kElems)  // of recv.x, from one on the wire
#define UNIT_BYTES (16 / CHUNKS_MADE)                    // of the wire, that make one of recv.x

// Which of the record's scales a column has.
DEVICE u64 scale_of_column(u64 column) { return SCALE_BLOCK ? column / SCALE_BLOCK : 0; }

// A chunk of recv.x from the elements of `bits` from `first` on.
DEVICE Chunk decoded(const Chunk& bits, u32 first, float scale)
{
    Chunk out = zero_chunk();
    UNROLL for (u32 i = 0; i < RecvRow::kElems; ++i) {
        const float value = decode_bits(get<WireRow::Elem>(bits, first + i), scale);
        set<RecvRow::Elem>(out, i, encode<RECV_DTYPE>(value));
    }
    return out;
}

// Chunk c of recv.x's row, to every row that gets a copy.
DEVICE void store_copies(const Args& a, const RowPlan& plan, u64 c, const Chunk& chunk)
{
    for (u32 i = 0; i < plan.num; ++i)
        RecvRow::store((void*)recv_row(a, plan.rows[i]), c, chunk, rows_aligned());
}

// ---- flags: a thread makes a chunk of recv.x at a time, so that stores of a warp are neighbours -----
DEVICE Chunk load_unit(u64 at)
{
    Chunk unit = zero_chunk();
    if constexpr (UNIT_BYTES == 16) unit = to_chunk(ld_v4((const void*)at));
    if constexpr (UNIT_BYTES == 8) unit = to_chunk(ld(reinterpret_cast<const u64*>(at)), 0);
    if constexpr (UNIT_BYTES == 4) unit.words[0] = ld(reinterpret_cast<const u32*>(at));
    return unit;
}

// One team: the row of the record at `record`.
DEVICE void decode_record(const Args& a, const RowPlan& plan, u64 record)
{
    const u64 num_chunks = RecvRow::num_chunks();
    const float* scales = reinterpret_cast<const float*>(record + RECORD_SCALE_OFF);
    const u32 step = team_threads();
    for (u64 c = team_thread(); c < num_chunks; c += CHUNKS_AT_ONCE * step) {
        Chunk units[CHUNKS_AT_ONCE];
        float scale[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n) {
            const u64 at = c + n * step;
            scale[n] = 1.0f;
            if (at >= num_chunks) continue;
            units[n] = load_unit(record + RECORD_ROW_OFF + at * UNIT_BYTES);
            if (CODEC_SCALED) scale[n] = ld(scales + scale_of_column(at * RecvRow::kElems));
        }
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * step < num_chunks)
                store_copies(a, plan, c + n * step, decoded(units[n], 0, scale[n]));
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

// The lane's chunk of the image: whether it is one of the row, and which.
DEVICE bool is_row(u32 number, u64* chunk)
{
    const u64 byte = ((u64)number * PIECE_CHUNKS + lane_id()) * 16;
    *chunk = (byte - RECORD_ROW_OFF) / 16;
    return lane_id() < PIECE_CHUNKS && byte >= RECORD_ROW_OFF && byte < RECORD_SCALE_OFF;
}

// One warp: the scale of the lane's chunk of `own`. False as in wait_piece.
DEVICE bool read_scale(const Args& a, const Piece& own, u64 epoch, float* scale)
{
    u64 c;
    const bool row = is_row(own.number, &c);
    *scale = 1.0f;
    const u32 at = (u32)(RECORD_SCALE_OFF + 4 * scale_of_column(row ? c * WireRow::kElems : 0));
    return !CODEC_SCALED || read_floats(a, own, at, row, epoch, scale);
}

// The lane's chunk of piece `number`, decoded to every row that gets a copy. Meta and scales go
// nowhere.
DEVICE void place_decoded(const Args& a, const RowPlan& plan, u32 number, Pair chunk, float scale)
{
    u64 c;
    if (!is_row(number, &c)) return;
    const Chunk bits = to_chunk(chunk.low, chunk.high);
    UNROLL for (u32 n = 0; n < CHUNKS_MADE; ++n)
        store_copies(a, plan, c * CHUNKS_MADE + n, decoded(bits, n * RecvRow::kElems, scale));
}
#endif
