// Peers that this rank cannot load from and store to: where their bytes are packed, and how the
// mover and the kernels tell each other (docs/protocol.md, "Remote peers").
//
// REMOTE 0: there are none, and everything behind `if (REMOTE ...)` is gone. 1: a host thread
// moves bytes; kernels ring doors and it stores `arrived`. 2: kernels put them with NVSHMEM.
//
// BOUNCE, with REMOTE 1: the network cannot reach the memory that kernels are good at. Then the stages
// work on an image of the areas, and kernels beside them carry bytes between that and the memory of the
// host that the network reaches: push, behind a sending stage, and pull, ahead of a receiving one
// (bounce.cuh). They also speak with the mover for the stages; only acknowledgements go around them.
#pragma once
#include "nvshmem.cuh"

#define DOOR_HEAD 0u
#define DOOR_PRIVATE 1u
#define DOOR_RECORDS 2u
#define DOOR_ROWS 3u
#define DOOR_ACK 4u
#define DOOR_TICKET 5u  // + half
#define TICKET_BITS 24u
#define LANDED_FREE (1ull << 62)

#define PLAN_RECORD_FIRST 0u
#define PLAN_RECORD_COUNT 1u
#define PLAN_ROW_FIRST 2u
#define PLAN_ROW_COUNT 3u
#define PLAN_ROW_BASE 4u

#define CHANNEL_HEAD 0u
#define CHANNEL_ACK 1u
#define CHANNEL_RECORDS 2u
#define CHANNEL_ROWS (CHANNEL_RECORDS + (u32)RECORD_CHUNKS)

// The last two words of a head.
#define HEAD_ROW_BASE (HEAD_WORDS - 2)  // where our rows for its source land there
#define HEAD_SHARE (HEAD_WORDS - 1)     // records from this very replica

DEVICE bool is_remote(const Args& a, u64 rank) { return REMOTE && peer_base(a, rank) == 0; }

// ---- words ------------------------------------------------------------------------------------
DEVICE u64* flag_word(const Args& a, u64 offset, u64 index)
{
    return reinterpret_cast<u64*>(a.remote_flags + offset) + index;
}

DEVICE u64 pair_number(const Args& a, u64 rank) { return a.slot * NUM_RANKS + rank; }

DEVICE u64* plan_word(const Args& a, u64 rank, u32 field)
{
    const u64 n = pair_number(a, rank) * PLAN_WORDS + field;
    return BOUNCE ? local_at<u64>(a, LOC_PLAN, n) : flag_word(a, FLG_PLAN, n);
}

DEVICE u64 channel_number(const Args& a, u64 source, u32 channel)
{
    return pair_number(a, source) * CHANNELS + channel;
}

DEVICE u64* arrived_word(const Args& a, u64 source, u32 channel)
{
    return flag_word(a, FLG_ARRIVED, channel_number(a, source, channel));
}

DEVICE u64* door_word(const Args& a, u32 door)
{
    return flag_word(a, FLG_DOOR, a.slot * DOOR_WORDS + door);
}

// A bounce: what push finds instead.
DEVICE u64* rung_word(const Args& a, u32 door)
{
    return local_at<u64>(a, LOC_RUNG, a.slot * DOOR_WORDS + door);
}

// One thread: what the door stands for is complete; everything that this thread knows of comes
// before it.
DEVICE void ring(const Args& a, u32 door, u64 epoch)
{
    st_release_sys(BOUNCE && door != DOOR_ACK ? rung_word(a, door) : door_word(a, door), epoch);
}

// A bounce: the receiving halves, and up to which epoch pull has brought what each takes.
#define HALF_DISPATCH 0u
#define HALF_COMBINE 1u

DEVICE u64 half_number(const Args& a, u32 half) { return a.slot * 2 + half; }

DEVICE u64* pulled_word(const Args& a, u32 half)
{
    return local_at<u64>(a, LOC_PULLED, half_number(a, half));
}

// Streams that wait for the mover's word (docs/protocol.md) shall go on.
DEVICE void wake_streams(const Args& a)
{
    for (u32 i = 0; BOUNCE && i < LANDED_WORDS; ++i) st_relaxed_sys(flag_word(a, FLG_LANDED, i), LANDED_FREE);
}

// One of `parts` is done with what door `door` (PRIVATE, RECORDS or ROWS) stands for: the last one
// rings. Begins anew by itself. One thread, behind a barrier of those that it speaks for.
DEVICE void part_done(const Args& a, u32 door, u32 parts, u64 epoch)
{
    u32* done = local_at<u32>(a, LOC_PACKED, a.slot * 3 + door - DOOR_PRIVATE);
    if (atomic_inc_acq_rel_gpu(done, parts - 1) == parts - 1) ring(a, door, epoch);
}

// nvshmem: how much of a chunk is packed.
DEVICE u32* packed_count(const Args& a, u64 n)
{
    return local_at<u32>(a, LOC_PACKED, a.slot * (NUM_RANKS * RECORD_CHUNKS + NUM_GROUPS * ROW_CHUNKS) + n);
}

// ---- areas ------------------------------------------------------------------------------------
DEVICE u64* out_head(const Args& a, u64 dest)
{
    return reinterpret_cast<u64*>(a.remote_bulk + BLK_OUT_HEAD + pair_number(a, dest) * HEAD_BYTES);
}

DEVICE u64* in_head(const Args& a, u64 source)
{
    return reinterpret_cast<u64*>(a.remote_bulk + BLK_IN_HEAD + pair_number(a, source) * HEAD_BYTES);
}

DEVICE u64 staged_record(const Args& a, u64 n)
{
    return a.remote_bulk + BLK_OUT_RECORD + (a.slot * STAGED_RECORDS + n) * RECORD_BYTES;
}

DEVICE u64 landed_record(const Args& a, u64 source, u64 i)
{
    return a.remote_bulk + BLK_IN_RECORD +
           (pair_number(a, source) * SOURCE_TOKENS + i) * RECORD_BYTES;
}

DEVICE u64 staged_row(const Args& a, u64 n)
{
    return a.remote_bulk + BLK_OUT_ROW + (a.slot * STAGED_ROWS + n) * COMBINE_STRIDE;
}

DEVICE u64 landed_row(const Args& a, u64 n)
{
    return a.remote_bulk + BLK_IN_ROW + (a.slot * LANDING_ROWS + n) * COMBINE_STRIDE;
}

// A bounce: how many rows land from a rank.
DEVICE u32* return_count(const Args& a, u64 rank)
{
    return local_at<u32>(a, LOC_RETURN_COUNT, pair_number(a, rank));
}

// First staged row of each source group, in a[group] to a[group + 1].
DEVICE u32* staged_first(const Args& a)
{
    return local_at<u32>(a, LOC_STAGED_FIRST, a.slot * (NUM_GROUPS + 1));
}

// Which arrival record i, or row n, of a source comes with.
DEVICE u32 record_channel(u32 i)
{
    const u32 chunk = REMOTE == 2 ? i / (u32)REMOTE_CHUNK : (i < PRIVATE_RECORDS ? 0 : 1);
    return CHANNEL_RECORDS + chunk;
}

DEVICE u32 row_channel(u32 n)
{
    return CHANNEL_ROWS + (REMOTE == 2 ? n / (u32)REMOTE_CHUNK : 0);
}

// Records, or rows, of chunk c where there are `total`.
DEVICE u32 chunk_size(u32 c, u32 total)
{
    return min(total - c * (u32)REMOTE_CHUNK, (u32)REMOTE_CHUNK);
}

// ---- counting -----------------------------------------------------------------------------------
struct RemoteCounts {   // in shared memory; clear at first
    u32* records;       // [NUM_RANKS] tokens seen so far that this replica sends there
    u32* rows;          // [NUM_RANKS + 1] rows those of all replicas get back; then where they land
    u32* first;         // [NUM_RANKS + 1] where the staged records of each rank begin
};

DEVICE u32 remote_counts_words() { return REMOTE ? 3 * (u32)NUM_RANKS + 2 : 0; }

DEVICE RemoteCounts remote_counts_at(u32* words)
{
    RemoteCounts c;
    c.records = words;
    c.rows = c.records + NUM_RANKS;
    c.first = c.rows + NUM_RANKS + 1;
    return c;
}

// ---- acknowledgements and giving up -------------------------------------------------------------
// proxied: the rows that go back acknowledge too, so this is for stages that send none.
DEVICE void ring_ack(const Args& a, u64 epoch)
{
    if (REMOTE != 1 || blockIdx.x > 0 || warp_id() != num_warps() - 1) return;
    __syncwarp();
    if (lane_id() == 0) ring(a, DOOR_ACK, epoch);
}

// One thread: every remote peer shall stop.
DEVICE void abort_remote(const Args& a, u64 word)
{
    if (REMOTE == 1) {
        st_release_sys(flag_word(a, FLG_ABORT_OUT, 0), word);
        wake_streams(a);
    }
    if (REMOTE != 2) return;
    for (u32 r = 0; r < NUM_RANKS; ++r)
        if (is_remote(a, r))
            put_word(a, r, reinterpret_cast<u64*>(a.symmetric + SYM_ABORT), word);
}

// As load_abort, and what the mover has heard. Only in waits, since it is memory of the host; the
// other stages then find it in their own.
DEVICE u64 hear_abort(const Args& a)
{
    u64* own = reinterpret_cast<u64*>(a.symmetric + SYM_ABORT);
    const u64 word = ld_relaxed_sys(own);
    if (REMOTE != 1 || word) return word;
    const u64 heard = ld_relaxed_sys(flag_word(a, FLG_ABORT_IN, 0));
    if (heard) st_relaxed_sys(own, heard);
    return heard;
}
