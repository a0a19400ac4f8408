// Placement at the receiver: where each source group's rows of each local expert go.
#pragma once
#include "dtype.cuh"
#include "protocol.cuh"

struct Placement {
    u32* base;         // [G][num_local] first row of (group, expert) within the expert
    u32* expert_rows;  // [num_local + 1] rows of each expert; after the scan its first row
    u32* group_start;  // [G + 1] records of earlier groups
    u32* scratch;      // one word
};

DEVICE Placement placement_at(const Args& a, u32* words)
{
    Placement s;
    s.base = words;
    s.expert_rows = s.base + NUM_GROUPS * a.num_local;
    s.group_start = s.expert_rows + a.num_local + 1;
    s.scratch = s.group_start + NUM_GROUPS + 1;
    return s;
}

// ---- heads ------------------------------------------------------------------------------------
DEVICE bool heads_arrived(const Args& a, u64 epoch)
{
    bool ok = true;
    for (u64 i = threadIdx.x; i < NUM_RANKS * HEAD_WORDS && ok; i += blockDim.x) {
        const u64 source = i / HEAD_WORDS;
        ok = wait_for(a, head_words(a.symmetric, a, source) + i % HEAD_WORDS, CountArrived{epoch},
                      epoch, epoch, PHASE_DISPATCH_RECV, (u32)source);
    }
    return __syncthreads_and(ok);
}

// What group g said in word `word` of its head (its replicas all say the same).
DEVICE u32 head_count(const Args& a, u64 group, u64 word)
{
    return count_value(ld_relaxed_sys(head_words(a.symmetric, a, group * REPLICAS) + word));
}

DEVICE u32 own_expert_count(const Args& a, u64 group, u64 expert)
{
    return head_count(a, group, 1 + expert);
}

DEVICE void count_rows(const Args& a, const Placement& s)
{
    for (u32 e = threadIdx.x; e < a.num_local; e += blockDim.x) {
        u32 rows = 0;
        for (u32 g = 0; g < NUM_GROUPS; ++g) {
            s.base[g * a.num_local + e] = rows;
            rows += own_expert_count(a, g, e);
        }
        s.expert_rows[e] = rows;
    }
    for (u32 g = threadIdx.x; g < NUM_GROUPS; g += blockDim.x) s.group_start[g] = head_count(a, g, 0);
    __syncthreads();
}

// ---- a cap: does anybody, anywhere, get more than it has room for? --------------------------------
DEVICE u32 total_over_groups(const Args& a, u32 i)
{
    u32 sum = 0;
    for (u32 g = 0; g < NUM_GROUPS; ++g) sum += head_count(a, g, 1 + MAX_LOCAL + i);
    return sum;
}

// Rows that unit i (an expert: batched; else a rank) would receive.
DEVICE u32 rows_needed(const Args& a, u32 i)
{
    if (LAYOUT != LAYOUT_GROUPED) return total_over_groups(a, i);
    u32 rows = 0;
    const u32 first = rank_first_expert(i);
    for (u32 e = 0; e < rank_num_experts(i); ++e)
        rows += (total_over_groups(a, first + e) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return rows;
}

// The lowest unit over capacity, found alike on every rank. Block 0 of each rank reports it.
DEVICE bool overflows(const Args& a, const Placement& s, u64 epoch)
{
    const u32 units = LAYOUT == LAYOUT_BATCHED ? NUM_EXPERTS : NUM_RANKS;
    u32* lowest = s.scratch;
    if (threadIdx.x == 0) *lowest = units;
    __syncthreads();
    for (u32 i = threadIdx.x; i < units; i += blockDim.x)
        if (rows_needed(a, i) > CAPACITY) atomicMin(lowest, i);
    __syncthreads();
    const u32 unit = *lowest;
    __syncthreads();
    if (unit == units) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        st(local_at<u64>(a, LOC_OVERFLOWED, a.slot), epoch);
        Status status = {CODE_OVERFLOW, PHASE_DISPATCH_RECV, a.rank, unit, epoch,
                         rows_needed(a, unit), CAPACITY, a.slot};
        report(a, STATUS_OVERFLOW, status);
    }
    return true;
}

// ---- block 0: what the caller reads beside the rows ------------------------------------------------
DEVICE u32 first_row(const Args& a, const Placement& s, u32 expert)
{
    return LAYOUT == LAYOUT_BATCHED ? expert * (u32)CAPACITY : s.expert_rows[expert];
}

DEVICE u32 expert_count(const Args& a, const Placement& s, u32 e)
{
    const u32 last = (u32)NUM_GROUPS - 1;
    return s.base[last * a.num_local + e] + own_expert_count(a, last, e);
}

DEVICE void write_counts(const Args& a, const Placement& s)
{
    u32* counts = local_at<u32>(a, LOC_COUNTS, a.slot * MAX_LOCAL);
    u32* offsets = local_at<u32>(a, LOC_OFFSETS, a.slot * (MAX_LOCAL + 1));
    for (u32 e = threadIdx.x; e < a.num_local; e += blockDim.x) {
        const u32 n = expert_count(a, s, e);
        st(counts + e, n);
        u64* total = local_at<u64>(a, LOC_STAT_EXPERT, e);
        st(total, ld(total) + n);
    }
    if (LAYOUT != LAYOUT_RANK)
        for (u32 e = threadIdx.x; e <= a.num_local; e += blockDim.x)
            st(offsets + e, first_row(a, s, e));
    for (u32 g = threadIdx.x; g < NUM_GROUPS; g += blockDim.x) {
        const u32 records = s.group_start[g + 1] - s.group_start[g];
        u32 rows = 0;
        for (u32 e = 0; e < a.num_local; ++e) rows += own_expert_count(a, g, e);
        u64* recv = local_at<u64>(a, LOC_STAT_RECV, g);
        u64* back = local_at<u64>(a, LOC_STAT_ROWS, g);
        st(recv, ld(recv) + records);
        st(back, ld(back) + (ROWS_PER_RANK ? records : rows));
    }
    if (threadIdx.x == 0) {
        const u32 records = s.group_start[NUM_GROUPS];
        st(local_at<u32>(a, LOC_NUM_RECORDS, a.slot), records);
        u32 rows = LAYOUT == LAYOUT_RANK ? records : 0;
        if (LAYOUT == LAYOUT_GROUPED) rows = s.expert_rows[a.num_local];
        if (LAYOUT == LAYOUT_BATCHED)
            for (u32 e = 0; e < a.num_local; ++e) rows += s.expert_rows[e];
        st(local_at<u32>(a, LOC_NUM_ROWS, a.slot), rows);
    }
}

// ---- received rows -----------------------------------------------------------------------------------
DEVICE bool rows_aligned() { return WIRE_ROW_BYTES % 16 == 0; }

DEVICE u64 recv_row(const Args& a, u64 row)
{
    return a.local + LOC_X + a.slot * SLOT_X_BYTES + row * WIRE_ROW_BYTES;
}

DEVICE float* recv_scale(const Args& a, u64 row)
{
    return local_at<float>(a, LOC_X_SCALE, (a.slot * SLOT_ROWS + row) * NUM_SCALES);
}

DEVICE void set_source(const Args& a, u64 row, u32 group, u32 token)
{
    st(local_at<u32>(a, LOC_SRC_RANK, a.slot * SLOT_ROWS + row), group);
    st(local_at<u32>(a, LOC_SRC_TOKEN, a.slot * SLOT_ROWS + row), token);
}

// grouped: rows between an expert's last and the next one's first are zero and come from nowhere.
DEVICE void write_pads(const Args& a, const Placement& s)
{
    for (u32 e = blockIdx.x; e < a.num_local; e += gridDim.x) {
        const u32 end = s.expert_rows[e + 1];
        for (u32 row = s.expert_rows[e] + expert_count(a, s, e); row < end; ++row) {
            const Chunk zero = zero_chunk();
            for (u64 c = threadIdx.x; c < Row<WIRE_DTYPE>::num_chunks(); c += blockDim.x)
                Row<WIRE_DTYPE>::store((void*)recv_row(a, row), c, zero, rows_aligned());
            for (u64 b = threadIdx.x; b < NUM_SCALES; b += blockDim.x) st(recv_scale(a, row) + b, 0.0f);
            if (threadIdx.x == 0) {
                set_source(a, row, NO_EXPERT, NO_EXPERT);
                st(local_at<float>(a, LOC_ROW_WEIGHT, a.slot * SLOT_ROWS + row), 0.0f);
            }
        }
    }
}

DEVICE u32 group_of(const Placement& s, u32 record)
{
    u32 low = 0, high = (u32)NUM_GROUPS - 1;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (s.group_start[middle] <= record)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Where one record goes; in shared memory, filled by one warp.
struct RowPlan {
    u32 num;              // rows of recv.x that get a copy
    u32 rows[WARP_SIZE];  // [num]
};

// One warp: the rows that record j (of `group`, with this meta) goes to. `keep`: write down what
// the caller and the later stages want to know about them; once a record.
DEVICE void plan_record(const Args& a, const Placement& s, const u32* meta, u32 j, u32 group,
                        bool keep, RowPlan& plan)
{
    const u32 k = lane_id();
    const u32 expert = k < TOP_K ? ld(meta + META_EXPERT + k) : NO_EXPERT;
    const bool wanted = LAYOUT == LAYOUT_RANK ? k == 0 : expert != NO_EXPERT;
    u32 row = j;  // rank layout
    if (LAYOUT != LAYOUT_RANK && wanted)
        row = first_row(a, s, expert) + s.base[group * a.num_local + expert] +
              ld(meta + META_INDEX + k);
    const u32 mask = __ballot_sync(FULL_WARP, wanted);
    if (wanted) plan.rows[__popc(mask & ((1u << k) - 1))] = row;
    if (k == 0) plan.num = __popc(mask);
    if (!keep) return;

    const u64 kept = a.slot * NUM_GROUPS * MAX_TOKENS + j;
    u32* copy = reinterpret_cast<u32*>(a.local + LOC_META + kept * META_BYTES);
    for (u32 i = k; i < META_WEIGHT + TOP_K; i += WARP_SIZE) st(copy + i, ld(meta + i));
    if (wanted) set_source(a, row, group, ld(meta + META_TOKEN));
    if (k >= TOP_K) return;
    st(local_at<u32>(a, LOC_ROW_OF, kept * TOP_K + k), row);
    const float weight = __uint_as_float(ld(meta + META_WEIGHT + k));
    if (LAYOUT == LAYOUT_RANK) {
        const u64 at = (a.slot * SLOT_ROWS + j) * TOP_K + k;
        st(local_at<u32>(a, LOC_ROW_EXPERT, at), expert);
        st(local_at<float>(a, LOC_ROW_WEIGHT, at), weight);
    } else if (wanted) {
        st(local_at<float>(a, LOC_ROW_WEIGHT, a.slot * SLOT_ROWS + row), weight);
    }
}

// Waits for every head and works out where rows go. What the block does next.
enum class Step { receive, skip, stop };

DEVICE Step place_rows(const Args& a, const Placement& s, u64 epoch)
{
    if (!heads_arrived(a, epoch)) return Step::stop;
    if (blockIdx.x == 0 && threadIdx.x == 0) st(done_word(a), epoch);
    if (CAPPED && overflows(a, s, epoch)) return Step::skip;
    count_rows(a, s);
    if (warp_id() == 0) {
        warp_exclusive_scan(s.group_start, NUM_GROUPS, 1);
        if (LAYOUT == LAYOUT_GROUPED) warp_exclusive_scan(s.expert_rows, a.num_local, ALIGNMENT);
    }
    __syncthreads();
    if (blockIdx.x == 0) write_counts(a, s);
    if (LAYOUT == LAYOUT_GROUPED) write_pads(a, s);
    return Step::receive;
}
