// dispatch_recv, with flags in the data. Warps share out the pieces (four lines) of all records.
//
// A warp polls its piece into registers and, unless it is the first, the record's first piece,
// whose meta says where the row goes. No barrier after the heads.
//
// Reads: own head, record.  Writes: own received rows, meta, row_of, epoch.
#include "line.cuh"
#include "placement.cuh"

struct WarpSpace {  // shared memory of one warp
    u64 head_piece[WARP_WORDS];  // words of the record's first piece: its meta, above all
    RowPlan plan;
};
static_assert(sizeof(WarpSpace) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

DEVICE void keep_words(WarpSpace& space, Pair v)
{
    const u32 word = lane_word(0);
    space.head_piece[word] = v.low;
    if (!holds_flag()) space.head_piece[word + 1] = v.high;
    __syncwarp();
}

// Word i of the image, to every row that gets a copy. Meta words go nowhere.
DEVICE void place_word(const Args& a, const RowPlan& plan, u32 i, u64 value)
{
    const u64 byte = (u64)i * 8;
    if (byte < RECORD_ROW_OFF) return;
    if (byte < RECORD_ROW_OFF + WIRE_ROW_BYTES) {
        for (u32 n = 0; n < plan.num; ++n)
            st(reinterpret_cast<u64*>(recv_row(a, plan.rows[n]) + byte - RECORD_ROW_OFF), value);
        return;
    }
    if (byte < RECORD_SCALE_OFF) return;
    const u64 block = (byte - RECORD_SCALE_OFF) / 4;
    for (u32 half = 0; half < 2; ++half)
        if (block + half < NUM_SCALES)
            for (u32 n = 0; n < plan.num; ++n)
                st(recv_scale(a, plan.rows[n]) + block + half,
                   __uint_as_float((u32)(value >> 32 * half)));
}

// Piece `piece` of record j.
DEVICE bool receive_piece(const Args& a, const Placement& s, WarpSpace& space, u32 j, u32 piece,
                          u64 epoch)
{
    const u32 group = group_of(s, j);
    const u32 peer = group * (u32)REPLICAS;
    const u64 record = record_at(a.symmetric, a, group, j - s.group_start[group]);
    Pair own, first;
    if (!wait_line(a, record, piece, RECORD_WORDS, epoch, PHASE_DISPATCH_RECV, peer, &own))
        return false;
    first = own;
    if (piece > 0 && LAYOUT != LAYOUT_RANK &&
        !wait_line(a, record, 0, RECORD_WORDS, epoch, PHASE_DISPATCH_RECV, peer, &first))
        return false;
    if (piece == 0 || LAYOUT != LAYOUT_RANK) {
        keep_words(space, first);
        plan_record(a, s, reinterpret_cast<const u32*>(space.head_piece), j, group, piece == 0,
                    space.plan);
    } else if (lane_id() == 0) {
        space.plan.num = 1;
        space.plan.rows[0] = j;
    }
    __syncwarp();
    if (lane_live(piece, RECORD_WORDS)) {
        const u32 word = lane_word(piece);
        place_word(a, space.plan, word, own.low);
        if (!holds_flag()) place_word(a, space.plan, word + 1, own.high);
    }
    __syncwarp();  // nobody still reads this warp's space
    return true;
}

extern "C" __global__ void dispatch_recv_lines(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;

    DYNAMIC_SHARED(WarpSpace, spaces);
    const Placement s = placement_at(a, reinterpret_cast<u32*>(spaces + num_warps()));
    if (place_rows(a, s, epoch) != Step::receive) return;
    const u32 pieces = num_pieces(RECORD_WORDS);
    const u32 tasks = s.group_start[NUM_GROUPS] * pieces;
    for (u32 task = blockIdx.x * num_warps() + warp_id(); task < tasks;
         task += gridDim.x * num_warps())
        if (!receive_piece(a, s, spaces[warp_id()], task / pieces, task % pieces, epoch)) return;
}
