// Placement at the receiver: where each source group's rows of each local expert go.
#pragma once
#include "dtype.cuh"
#include "remote_rows.cuh"

struct Placement {
    u32* base;          // [G][num_local] first row of (group, expert) within the expert
    u32* expert_total;  // [num_local] rows of each expert
    u32* expert_rows;   // [num_local + 1] grouped: first row of each expert
    u32* group_start;   // [G + 1] records of earlier groups
    u32* scratch;       // one word
    u32* source_start;  // [NUM_SOURCES + 1] records of earlier sources
    u32* group_rows;    // remote peers: [G + 1] rows that go back to earlier groups
};

DEVICE Placement placement_at(const Args& a, u32* words)
{
    Placement s;
    s.base = words;
    s.expert_total = s.base + NUM_GROUPS * a.num_local;
    s.expert_rows = s.expert_total + a.num_local;
    s.group_start = s.expert_rows + a.num_local + 1;
    s.scratch = s.group_start + NUM_GROUPS + 1;
    s.group_rows = s.scratch + 1;
    s.source_start = REMOTE && REPLICAS > 1 ? s.group_rows + NUM_GROUPS + 1 : s.group_start;
    return s;
}

// ---- heads ------------------------------------------------------------------------------------
// Where rows go follows from all words of all heads; but in the rank layout only block 0, which
// reports counts, needs more than the first. With a cap every block looks for an overflow in all of
// them: words are not ordered among each other.
DEVICE bool needs_counts()
{
    return LAYOUT != LAYOUT_RANK || CAPPED || blockIdx.x == 0 || (REMOTE && REPLICAS > 1);
}

DEVICE bool wait_word(const Args& a, u64 source, u64 word, u64 epoch, u64* found)
{
    if (is_remote(a, source)) return wait_remote_head(a, source, word, epoch, found);
    return wait_for(a, head_words(a.symmetric, a, source) + word, CountArrived{epoch}, epoch, epoch,
                    from_rank(PHASE_DISPATCH_RECV, (u32)source), found);
}

// Waits for words [first, last) of every head and keeps their counts: group_start[g] records,
// base[g][e] rows. Replicas of a group all say the same; each must have spoken, since that also
// frees its combine rows.
DEVICE bool words_arrived(const Args& a, const Placement& s, u64 first, u64 last, u64 epoch)
{
    bool ok = true;
    for (u64 i = threadIdx.x; i < NUM_RANKS * (last - first) && ok; i += blockDim.x) {
        const u64 source = i / (last - first), word = first + i % (last - first);
        u64 found;
        ok = wait_word(a, source, word, epoch, &found);
        if (REMOTE && REPLICAS > 1 && word == HEAD_SHARE) s.source_start[source] = count_value(found);
        if (source % REPLICAS) continue;
        const u64 group = source / REPLICAS;
        if (word == 0)
            s.group_start[group] = count_value(found);
        else if (word <= a.num_local)
            s.base[group * a.num_local + word - 1] = count_value(found);
    }
    return __syncthreads_and(ok);
}

DEVICE bool heads_arrived(const Args& a, const Placement& s, u64 epoch)
{
    if (LAYOUT == LAYOUT_RANK)
        return words_arrived(a, s, 0, needs_counts() ? (u64)HEAD_WORDS : 1, epoch);
    // First words first: all blocks polling all words slow down what they wait for (50 against
    // 27 µs a step at 128 tokens on 2 H200s, 2026-11-30).
    return words_arrived(a, s, 0, 1, epoch) && words_arrived(a, s, 1, HEAD_WORDS, epoch);
}

// Counts become beginnings.
DEVICE void add_up(const Args& a, const Placement& s)
{
    if (needs_counts())
        for (u32 e = threadIdx.x; e < a.num_local; e += blockDim.x) {
            u32 rows = 0;
            for (u32 g = 0; g < NUM_GROUPS; ++g) {
                const u32 count = s.base[g * a.num_local + e];
                s.base[g * a.num_local + e] = rows;
                rows += count;
            }
            s.expert_total[e] = s.expert_rows[e] = rows;
        }
    if (warp_id() == 0) warp_exclusive_scan(s.group_start, NUM_GROUPS, 1);
    if (REMOTE && REPLICAS > 1 && warp_id() == 0) warp_exclusive_scan(s.source_start, NUM_RANKS, 1);
    __syncthreads();
    if (LAYOUT != LAYOUT_GROUPED) return;
    if (warp_id() == 0) warp_exclusive_scan(s.expert_rows, a.num_local, ALIGNMENT);
    __syncthreads();
}

// ---- a cap: does anybody, anywhere, get more than it has room for? --------------------------------
// What group g said in word `word` of its head.
DEVICE u32 head_count(const Args& a, u64 group, u64 word)
{
    if (is_remote(a, group * REPLICAS)) return count_value(ld(in_head(a, group * REPLICAS) + word));
    return count_value(ld_relaxed_sys(head_words(a.symmetric, a, group * REPLICAS) + word));
}

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
        st_relaxed_sys(local_at<u64>(a, LOC_OVERFLOWED, a.slot), epoch);
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

// Rows that group g sent, summed over experts by one warp.
DEVICE u32 rows_of_group(const Args& a, const Placement& s, u32 g)
{
    u32 rows = 0;
    for (u32 e = lane_id(); e < a.num_local; e += WARP_SIZE) {
        const u32 end = g + 1 < NUM_GROUPS ? s.base[(g + 1) * a.num_local + e] : s.expert_total[e];
        rows += end - s.base[g * a.num_local + e];
    }
    return warp_sum(rows);
}

DEVICE void count_groups(const Args& a, const Placement& s)
{
    for (u32 g = warp_id(); g < NUM_GROUPS; g += num_warps()) {
        const u32 records = s.group_start[g + 1] - s.group_start[g];
        const u32 rows = ROWS_PER_RANK ? records : rows_of_group(a, s, g);
        if (lane_id() > 0) continue;
        if (REMOTE) s.group_rows[g] = rows;
        atomicAdd(local_at<u64>(a, LOC_STAT_RECV, g), (u64)records);
        atomicAdd(local_at<u64>(a, LOC_STAT_ROWS, g), (u64)rows);
    }
}

DEVICE u32 rows_in_use(const Args& a, const Placement& s)
{
    if (LAYOUT == LAYOUT_RANK) return s.group_start[NUM_GROUPS];
    if (LAYOUT == LAYOUT_GROUPED) return s.expert_rows[a.num_local];
    u32 rows = 0;
    for (u32 e = lane_id(); e < a.num_local; e += WARP_SIZE) rows += s.expert_total[e];
    return warp_sum(rows);
}

DEVICE void write_counts(const Args& a, const Placement& s)
{
    u32* counts = local_at<u32>(a, LOC_COUNTS, a.slot * MAX_LOCAL);
    u32* offsets = local_at<u32>(a, LOC_OFFSETS, a.slot * (MAX_LOCAL + 1));
    for (u32 e = threadIdx.x; e < a.num_local; e += blockDim.x) {
        const u32 n = s.expert_total[e];
        st(counts + e, n);
        atomicAdd(local_at<u64>(a, LOC_STAT_EXPERT, e), (u64)n);
    }
    if (LAYOUT != LAYOUT_RANK)
        for (u32 e = threadIdx.x; e <= a.num_local; e += blockDim.x)
            st(offsets + e, first_row(a, s, e));
    count_groups(a, s);
    if (warp_id() > 0) return;
    const u32 rows = rows_in_use(a, s);
    if (lane_id() > 0) return;
    st(local_at<u32>(a, LOC_NUM_RECORDS, a.slot), s.group_start[NUM_GROUPS]);
    st(local_at<u32>(a, LOC_NUM_ROWS, a.slot), rows);
}

// ---- received rows -----------------------------------------------------------------------------------
DEVICE bool rows_aligned() { return RECV_ROW_BYTES % 16 == 0; }

DEVICE u64 recv_row(const Args& a, u64 row)
{
    return a.local + LOC_X + a.slot * SLOT_X_BYTES + row * RECV_ROW_BYTES;
}

DEVICE float* recv_scale(const Args& a, u64 row)
{
    return local_at<float>(a, LOC_X_SCALE, (a.slot * SLOT_ROWS + row) * RECV_SCALES);
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
        for (u32 row = s.expert_rows[e] + s.expert_total[e]; row < end; ++row) {
            const Chunk zero = zero_chunk();
            for (u64 c = threadIdx.x; c < Row<RECV_DTYPE>::num_chunks(); c += blockDim.x)
                Row<RECV_DTYPE>::store((void*)recv_row(a, row), c, zero, rows_aligned());
            for (u64 b = threadIdx.x; b < RECV_SCALES; b += blockDim.x) st(recv_scale(a, row) + b, 0.0f);
            if (threadIdx.x == 0) {
                set_source(a, row, NO_EXPERT, NO_EXPERT);
                st(local_at<float>(a, LOC_ROW_WEIGHT, a.slot * SLOT_ROWS + row), 0.0f);
            }
        }
    }
}

// Which of `num` parts holds `record`; part i begins at start[i].
DEVICE u32 part_of(const u32* start, u32 num, u32 record)
{
    u32 low = 0, high = num - 1;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (start[middle] <= record)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

DEVICE u32 group_of(const Placement& s, u32 record)
{
    return part_of(s.group_start, (u32)NUM_GROUPS, record);
}

// Record j comes from a group, or with remote peers from a rank.
DEVICE u32 source_of(const Placement& s, u32 record)
{
    if (!REMOTE || REPLICAS == 1) return group_of(s, record);
    return part_of(s.source_start, (u32)NUM_RANKS, record);
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
    if (REMOTE && LAYOUT == LAYOUT_RANK) row = s.group_start[group] + ld(meta + META_ROW);
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
        const u64 at = (a.slot * SLOT_ROWS + row) * TOP_K + k;
        st(local_at<u32>(a, LOC_ROW_EXPERT, at), expert);
        st(local_at<float>(a, LOC_ROW_WEIGHT, at), weight);
    } else if (wanted) {
        st(local_at<float>(a, LOC_ROW_WEIGHT, a.slot * SLOT_ROWS + row), weight);
    }
}

// Begins dispatch_recv, which may run beside its dispatch_send: false if the group has given up.
DEVICE bool begin_recv(const Args& a, u64* epoch)
{
    const u64 read = ld(read_word(a));
    const u64 abort = load_abort(a);
    *epoch = read + 1;
    note_epoch(*epoch);
    return !__syncthreads_or(threadIdx.x == 0 && aborted(a, abort, *epoch));
}

// Waits for every head and works out where rows go. True: rows are to be received. Block 0 reports
// the counts; the others receive, or it does both if it is alone.
DEVICE bool place_rows(const Args& a, const Placement& s, u64 epoch)
{
    if (!heads_arrived(a, s, epoch)) return false;
    if (CAPPED && overflows(a, s, epoch)) return false;
    add_up(a, s);
    if (blockIdx.x == 0) write_counts(a, s);
    if (REMOTE && blockIdx.x == 0) {
        __syncthreads();  // the rows of every group are counted
        plan_returns(a, s.group_rows);
    }
    if (LAYOUT == LAYOUT_GROUPED) write_pads(a, s);
    return is_row_block();
}
