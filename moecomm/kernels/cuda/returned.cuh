// What goes back for one received record: which rows of y, and where each belongs at the source.
#pragma once
#include "dtype.cuh"
#include "remote_rows.cuh"

struct Returned {  // in shared memory, filled by one warp
    u32 token;
    u32 group;
    u32 num;                 // rows to send back (or to sum)
    u32 place[WARP_SIZE];    // where each goes at the source
    u32 row[WARP_SIZE];      // of y
    float weight[WARP_SIZE];
#if HAS_REMOTE
    u32 first;   // number of its first row among those of the group
    u32 staged;  // where that is packed, plus 1; 0: all replicas are within reach
    u32 done;    // nvshmem: rows that completed a chunk
#endif
};
static_assert(sizeof(Returned) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

// In which order records go back: one for each source group in turn, the next group first, so that
// from the start all links are busy, with copies within the rank in between. Equal parts of the records
// stand for the groups, which are about equal. Number n of them, n < num_turns(records); at or past
// `records` there is none.
DEVICE u32 num_turns(u32 records)
{
    return (records + (u32)NUM_GROUPS - 1) / (u32)NUM_GROUPS * (u32)NUM_GROUPS;
}

DEVICE u32 record_in_turn(const Args& a, u32 n, u32 records)
{
    const u32 part = (n + (u32)(a.rank / REPLICAS) + 1) % (u32)NUM_GROUPS;
    return part * (num_turns(records) / (u32)NUM_GROUPS) + n / (u32)NUM_GROUPS;
}

DEVICE void load_returned(const Args& a, Returned& rec, u32 j)
{
    const u64 kept = a.slot * NUM_GROUPS * MAX_TOKENS + j;
    const u32* meta = reinterpret_cast<const u32*>(a.local + LOC_META + kept * META_BYTES);
    const u32 k = lane_id();
    // All that is needed, read in one go.
    const bool slot = k < TOP_K;
    const u32 token = ld(meta + META_TOKEN);
    const u32 group = ld(meta + META_GROUP);
    const u32 own_place = ld(meta + META_PLACE);
    const u32 expert = slot ? ld(meta + META_EXPERT + k) : NO_EXPERT;
    const u32 row = slot ? ld(local_at<u32>(a, LOC_ROW_OF, kept * TOP_K + k)) : 0;
    const float weight = slot ? __uint_as_float(ld(meta + META_WEIGHT + k)) : 0.0f;

    const bool wanted = LAYOUT == LAYOUT_RANK ? k == 0 : expert != NO_EXPERT;
    const u32 mask = __ballot_sync(FULL_WARP, wanted);
    const u32 at = __popc(mask & ((1u << k) - 1));
    if (wanted) {
        rec.row[at] = row;
        rec.place[at] = ROWS_PER_RANK ? own_place : k;
        rec.weight[at] = weight;
    }
    if (k == 0) {
        rec.token = token;
        rec.group = group;
        rec.num = __popc(mask);
#if HAS_REMOTE
        if (REMOTE) {
            const u32 begin = ld(staged_first(a) + group), end = ld(staged_first(a) + group + 1);
            rec.first = ld(meta + META_ROW);
            rec.staged = end > begin ? begin + rec.first + 1 : 0;
        }
#endif
    }
}

#define ROWS_AT_ONCE 4u  // independent loads under way in one thread

// Chunk c of what goes back for the record: the weighted sum of its rows, in slot order.
DEVICE Chunk weighted_sum(const Args& a, const Returned& rec, u64 c)
{
    typedef Row<COMBINE_DTYPE> Y;
    Sum<COMBINE_DTYPE> sum = Sum<COMBINE_DTYPE>::zero();
    for (u32 first = 0; first < rec.num; first += ROWS_AT_ONCE) {
        Chunk y[ROWS_AT_ONCE];
        for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
            if (first + i < rec.num)
                y[i] = Y::load((const void*)(a.y + rec.row[first + i] * a.y_stride), c, a.y_aligned);
        for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
            if (first + i < rec.num) sum.add(rec.weight[first + i], y[i]);
    }
    return sum.rounded();
}
