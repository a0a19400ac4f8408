// dispatch_recv, with flags in the data. Warps share out the pieces (four lines) of all records, one or
// two at a time.
//
// A warp polls its pieces into registers and, unless it has the first, the record's first piece,
// whose meta says where the row goes. No barrier after the heads.
//
// Reads: own head, record.  Writes: own received rows, meta, row_of, epoch.
#include "codec_recv.cuh"
#include "line.cuh"
#include "placement.cuh"

struct WarpSpace {  // shared memory of one warp
    u64 head_piece[WARP_WORDS];  // words of the record's first piece: its meta, above all
    RowPlan plan;
};
static_assert(sizeof(WarpSpace) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

DEVICE void keep_chunks(WarpSpace& space, Pair chunk)
{
    if (lane_id() < PIECE_CHUNKS) {
        space.head_piece[2 * lane_id()] = chunk.low;
        space.head_piece[2 * lane_id() + 1] = chunk.high;
    }
    __syncwarp();
}

// Chunk c (16 bytes) of the image, to every row that gets a copy. Meta goes nowhere.
DEVICE void place_chunk(const Args& a, const RowPlan& plan, u32 c, Pair chunk)
{
    const u64 byte = (u64)c * 16;
    if (byte < RECORD_ROW_OFF) return;
    if (byte < RECORD_SCALE_OFF) {
        const uint4 v = to_v4(to_chunk(chunk.low, chunk.high));
        for (u32 n = 0; n < plan.num; ++n)
            st_v4((void*)(recv_row(a, plan.rows[n]) + byte - RECORD_ROW_OFF), v);
        return;
    }
    const u64 block = (byte - RECORD_SCALE_OFF) / 4;
    for (u32 n = 0; n < plan.num; ++n)
        for (u32 i = 0; i < 4; ++i)
            if (block + i < NUM_SCALES)
                st(recv_scale(a, plan.rows[n]) + block + i,
                   __uint_as_float((u32)((i < 2 ? chunk.low : chunk.high) >> 32 * (i % 2))));
}

DEVICE Piece piece_of(const Args& a, const Placement& s, u32 j, u32 group, u32 number)
{
    Piece piece;
    piece.lines = record_at(a.symmetric, a, group, j - s.group_start[group]);
    piece.number = number;
    piece.words = RECORD_WORDS;
    piece.who = from_group(PHASE_DISPATCH_RECV, group);
    return piece;
}

// Where record j goes, into space.plan. `meta`: a first reading of its first piece. False as in
// wait_piece.
DEVICE bool find_rows(const Args& a, const Placement& s, WarpSpace& space, u32 j, u32 group, bool keep,
                      LineRead meta, u64 epoch)
{
    if (LAYOUT != LAYOUT_RANK || keep) {
        if (!wait_piece(a, piece_of(a, s, j, group, 0), epoch, meta)) return false;
        keep_chunks(space, to_chunks(meta.v));
        plan_record(a, s, reinterpret_cast<const u32*>(space.head_piece), j, group, keep, space.plan);
    } else if (lane_id() == 0) {
        space.plan.num = 1;
        space.plan.rows[0] = j;
    }
    __syncwarp();
    return true;
}

// A piece that has arrived, to every row of the plan.
DEVICE void place_piece(const Args& a, const WarpSpace& space, const Piece& piece, Pair v, float scale)
{
    const Pair chunk = to_chunks(v);
#if DECODES
    place_decoded(a, space.plan, piece.number, chunk, scale);
#else
    const u32 c = piece.number * PIECE_CHUNKS + lane_id();
    if (lane_id() < PIECE_CHUNKS && c < RECORD_WORDS / 2) place_chunk(a, space.plan, c, chunk);
#endif
}

// Pieces begin, begin + 1 ... of record j.
DEVICE bool receive_unit(const Args& a, const Placement& s, WarpSpace& space, u32 j, u32 begin,
                         u64 epoch)
{
    const u32 group = group_of(s, j);
    const auto pieces = [&](u32 i) {  // past the last one: a piece without a line
        return piece_of(a, s, j, group, i < PIECES_AT_ONCE ? begin + i : num_pieces(RECORD_WORDS));
    };
    LineRead reads[MOST_PIECES];
    UNROLL for (u32 i = 0; i < MOST_PIECES; ++i) reads[i] = pieces(i).read(epoch);
    LineRead meta = reads[0];
    if (LAYOUT != LAYOUT_RANK && begin > 0) meta = piece_of(a, s, j, group, 0).read(epoch);
    if (!find_rows(a, s, space, j, group, begin == 0, meta, epoch)) return false;
    float scale[MOST_PIECES] = {};
#if DECODES
    UNROLL for (u32 i = 0; i < MOST_PIECES; ++i)  // beside the reads under way
        if (!read_scale(a, pieces(i), epoch, &scale[i])) return false;
#endif
    if (!wait_pieces<MOST_PIECES>(a, pieces, epoch, reads)) return false;
    UNROLL for (u32 i = 0; i < MOST_PIECES; ++i)
        if (i < PIECES_AT_ONCE && begin + i < num_pieces(RECORD_WORDS))
            place_piece(a, space, pieces(i), reads[i].v, scale[i]);
    __syncwarp();  // nobody still reads this warp's space
    return true;
}

// In which order records come. A source's blocks send a share of its tokens each, all at a time: first
// come the first records of all shares, then the second ones (token_share). Groups in turn, our own
// first; equal parts of the records stand for them, which are about equal. Any order gives the same.
struct Arrivals {
    u32 records, part, senders, each;

    DEVICE explicit Arrivals(u32 total) : records(total)
    {
        part = (records + (u32)NUM_GROUPS - 1) / (u32)NUM_GROUPS;
        senders = min(part, num_row_blocks());  // as many as here
        each = senders ? (part + senders - 1) / senders : 0;
        senders = each ? (part + each - 1) / each : 0;  // the others have no share
    }

    DEVICE u32 num() const { return (u32)NUM_GROUPS * senders * each; }

    // Record number n < num(); at or past `records` there is none.
    DEVICE u32 record(const Args& a, u32 n) const
    {
        const u32 group = (n + (u32)(a.rank / REPLICAS)) % (u32)NUM_GROUPS, i = n / (u32)NUM_GROUPS;
        const u32 within = i % senders * each + i / senders;
        return within < part ? group * part + within : records;
    }
};

DEVICE void receive_units(const Args& a, const Placement& s, WarpSpace& space, u64 epoch)
{
    const u32 units = num_units(RECORD_WORDS);
    const Arrivals arrivals(s.group_start[NUM_GROUPS]);
    for (u32 task = row_block() * num_warps() + warp_id(); task < arrivals.num() * units;
         task += num_row_blocks() * num_warps()) {
        const u32 j = arrivals.record(a, task / units);
        if (j >= arrivals.records) continue;
        if (!receive_unit(a, s, space, j, task % units * (u32)PIECES_AT_ONCE, epoch)) return;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_recv_lines(Args a)
{
    u64 epoch;
    let_next_kernel_start();
    if (!begin_recv(a, &epoch)) return;
    DYNAMIC_SHARED(WarpSpace, spaces);
    const Placement s = placement_at(a, reinterpret_cast<u32*>(spaces + num_warps()));
    if (place_rows(a, s, epoch)) receive_units(a, s, spaces[warp_id()], epoch);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for dispatch_send
}
