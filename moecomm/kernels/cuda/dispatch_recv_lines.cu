// dispatch_recv, with flags in the data. Warps share out the pieces (four lines) of all records.
//
// A warp polls its piece into registers and, unless it is the first, the record's first piece,
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

// Piece `number` of record j.
DEVICE bool receive_piece(const Args& a, const Placement& s, WarpSpace& space, u32 j, u32 number,
                          u64 epoch)
{
    const u32 group = group_of(s, j);
    Piece own, first;
    own.lines = record_at(a.symmetric, a, group, j - s.group_start[group]);
    own.number = number;
    own.words = RECORD_WORDS;
    own.who = from_group(PHASE_DISPATCH_RECV, group);
    first = own;
    first.number = 0;
    const bool needs_meta = LAYOUT != LAYOUT_RANK || number == 0;
    LineRead r = own.read(epoch), meta = needs_meta ? first.read(epoch) : r;
#if DECODES
    float scale;
    if (!read_scale(a, own, epoch, &scale)) return false;  // beside the two reads under way
#endif
    if (!wait_piece(a, own, epoch, r)) return false;
    const Pair chunk = to_chunks(r.v);
    if (needs_meta) {
        if (!wait_piece(a, first, epoch, meta)) return false;
        keep_chunks(space, to_chunks(meta.v));
        plan_record(a, s, reinterpret_cast<const u32*>(space.head_piece), j, group, number == 0,
                    space.plan);
    } else if (lane_id() == 0) {
        space.plan.num = 1;
        space.plan.rows[0] = j;
    }
    __syncwarp();
#if DECODES
    place_decoded(a, space.plan, number, chunk, scale);
#else
    const u32 c = number * PIECE_CHUNKS + lane_id();
    if (lane_id() < PIECE_CHUNKS && c < RECORD_WORDS / 2) place_chunk(a, space.plan, c, chunk);
#endif
    __syncwarp();  // nobody still reads this warp's space
    return true;
}

DEVICE void receive_pieces(const Args& a, const Placement& s, WarpSpace& space, u64 epoch)
{
    const u32 pieces = num_pieces(RECORD_WORDS);
    const u32 records = s.group_start[NUM_GROUPS];
    const u32 own = s.group_start[a.rank / REPLICAS];  // our own records are there first
    for (u32 task = row_block() * num_warps() + warp_id(); task < records * pieces;
         task += num_row_blocks() * num_warps())
        if (!receive_piece(a, s, space, (own + task / pieces) % records, task % pieces, epoch)) return;
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_recv_lines(Args a)
{
    u64 epoch;
    let_next_kernel_start();
    if (!begin_recv(a, &epoch)) return;
    DYNAMIC_SHARED(WarpSpace, spaces);
    const Placement s = placement_at(a, reinterpret_cast<u32*>(spaces + num_warps()));
    if (place_rows(a, s, epoch)) receive_pieces(a, s, spaces[warp_id()], epoch);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for dispatch_send
}
