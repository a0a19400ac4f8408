// combine_send: expert output rows  →  back to the rank(s) that hold the token.
//
// Teams share out the received records. reduce="receiver": one row per (token, expert), to the
// place of its slot k. reduce="sender": the weighted fp32 sum over this rank's experts, rounded
// once, to the place of this rank. rank layout: the caller's row, to the place of this rank.
// Every replica of the source group gets a copy.
//
// Reads: y; own meta, row_of.  Writes: peers' combine_row, combine_flag, ack.
// Order: a row's bytes, the team's barrier, release of its flag.
#include "returned.cuh"
#include "team.cuh"

DEVICE u64 dest_row(const Args& a, const Returned& rec, u32 replica, u32 i)
{
    const u64 base = peer_base(a, rec.group * REPLICAS + replica);
    return combine_row(base, a, rec.token, rec.place[i]);
}

// Every replica within reach, then, for those that are not, the staging area.
#define COPIES (REPLICAS + (REMOTE ? 1 : 0))

// Where copy d of row i goes; 0: there is no such copy.
DEVICE u64 copy_row(const Args& a, const Returned& rec, u32 d, u32 i)
{
#if HAS_REMOTE
    if (REMOTE && d == REPLICAS) return rec.staged ? staged_row(a, rec.staged - 1 + i) : 0;
    if (is_remote(a, rec.group * REPLICAS + d)) return 0;
#endif
    return dest_row(a, rec, d, i);
}

// Each row as it is.
DEVICE void send_rows(const Args& a, const Returned& rec)
{
    typedef Row<COMBINE_DTYPE> Y;
    for (u32 i = 0; i < rec.num; ++i) {
        const void* y = (const void*)(a.y + rec.row[i] * a.y_stride);
        const u32 step = team_threads();
        for (u64 c = team_thread(); c < Y::num_chunks(); c += CHUNKS_AT_ONCE * step) {
            Chunk chunks[CHUNKS_AT_ONCE];
            UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
                if (c + n * step < Y::num_chunks()) chunks[n] = Y::load(y, c + n * step, a.y_aligned);
            UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
                if (c + n * step < Y::num_chunks())
                    for (u32 d = 0; d < COPIES; ++d) {
                        const u64 to = copy_row(a, rec, d, i);
                        if (REMOTE && !to) continue;
                        st_v4((void*)(to + (c + n * step) * 16), to_v4(chunks[n]));
                    }
        }
    }
}

// One row: the weighted sum.
DEVICE void send_sum(const Args& a, const Returned& rec)
{
    for (u64 c = team_thread(); c < Row<COMBINE_DTYPE>::num_chunks(); c += team_threads()) {
        const uint4 v = to_v4(weighted_sum(a, rec, c));
        for (u32 d = 0; d < COPIES; ++d) {
            const u64 to = copy_row(a, rec, d, 0);
            if (REMOTE && !to) continue;
            st_v4((void*)(to + c * 16), v);
        }
    }
}

// One team sends back what record j is owed.
DEVICE void return_record(const Args& a, Returned& rec, u32 j, u64 epoch)
{
    if (leads_team()) load_returned(a, rec, j);
    team_sync();
    if (SENDER_REDUCES)
        send_sum(a, rec);
    else
        send_rows(a, rec);
    team_sync();  // every thread's part of a row comes before its flag
    const u32 rows = SENDER_REDUCES ? 1 : rec.num;
    for (u32 i = team_thread(); i < rows * REPLICAS; i += team_threads()) {
        const u64 base = peer_base(a, rec.group * REPLICAS + i % REPLICAS);
        if (REMOTE && !base) continue;
        st_release_sys(combine_flag(base, a, rec.token, rec.place[i / REPLICAS]), epoch);
    }
}

// nvshmem: the block's teams return a record each, then all of them put the chunks that are full.
DEVICE void put_records(const Args& a, Returned* spaces, u32 records, u64 epoch)
{
#if HAS_REMOTE
    Returned& rec = spaces[team_id()];
    for (u32 first = blockIdx.x * num_teams(); first < records; first += gridDim.x * num_teams()) {
        const bool mine = first + team_id() < records;
        if (mine) return_record(a, rec, first + team_id(), epoch);
        if (leads_team()) {
            const u32 rows = !mine || !rec.staged ? 0 : SENDER_REDUCES ? 1 : rec.num;
            const u32 done = completed_rows(a, rec.group, rec.first, rows);
            if (lane_id() == 0) rec.done = done;
        }
        __syncthreads();  // all know what is complete, and may read it
        for (u32 n = 0; n < num_teams(); ++n)
            for (u32 mask = spaces[n].done; mask; mask &= mask - 1)
                put_rows(a, spaces[n].group, spaces[n].first + (u32)__ffs(mask) - 1, epoch);
        __syncthreads();  // nobody still reads the spaces
    }
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_send(Args a)
{
    wait_for_earlier_kernels();
    let_next_kernel_start();
    u64 epoch;
    const bool go = begin_combine(a, &epoch);
    acknowledge(a, epoch);
    // Where warps meet later, all of them go or none.
    const bool all = REMOTE == 2 ? __syncthreads_and(go) : team_all(go);
    if (!all) return ring_ack(a, epoch);

    DYNAMIC_SHARED(Returned, spaces);
    Returned& rec = spaces[team_id()];
    const u32 records = ld(local_at<u32>(a, LOC_NUM_RECORDS, a.slot));
    if (REMOTE == 2) return put_records(a, spaces, records, epoch);
    for (u32 n = blockIdx.x * num_teams() + team_id(); n < num_turns(records);
         n += gridDim.x * num_teams()) {
        const u32 j = record_in_turn(a, n, records);
        if (j >= records) continue;
        return_record(a, rec, j, epoch);
        team_sync();  // nobody still reads this team's space
    }
    if (REMOTE == 1) rows_packed(a, epoch);
}
