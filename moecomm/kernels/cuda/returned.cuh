// What goes back for one received record: which rows of y, and where each belongs at the source.
#pragma once
#include "dtype.cuh"
#include "protocol.cuh"

struct Returned {  // in shared memory, filled by one warp
    u32 token;
    u32 group;
    u32 num;                 // rows to send back (or to sum)
    u32 place[WARP_SIZE];    // where each goes at the source
    u32 row[WARP_SIZE];      // of y
    float weight[WARP_SIZE];
};
static_assert(sizeof(Returned) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

DEVICE void load_returned(const Args& a, Returned& rec, u32 j)
{
    const u64 kept = a.slot * NUM_GROUPS * MAX_TOKENS + j;
    const u32* meta = reinterpret_cast<const u32*>(a.local + LOC_META + kept * META_BYTES);
    const u32 k = lane_id();
    const bool wanted = k < TOP_K && ld(meta + META_EXPERT + k) != NO_EXPERT;
    const u32 mask = __ballot_sync(FULL_WARP, wanted);
    const u32 at = __popc(mask & ((1u << k) - 1));
    if (wanted && LAYOUT != LAYOUT_RANK) {
        rec.row[at] = ld(local_at<u32>(a, LOC_ROW_OF, kept * TOP_K + k));
        rec.place[at] = ROWS_PER_RANK ? ld(meta + META_PLACE) : k;
        rec.weight[at] = __uint_as_float(ld(meta + META_WEIGHT + k));
    }
    if (k == 0) {
        rec.token = ld(meta + META_TOKEN);
        rec.group = ld(meta + META_GROUP);
        rec.num = LAYOUT == LAYOUT_RANK ? 1 : __popc(mask);
        if (LAYOUT == LAYOUT_RANK) {
            rec.row[0] = j;
            rec.place[0] = ld(meta + META_PLACE);
        }
    }
}
