// The direct protocol: launch arguments, where everything lies, and reports. Waits: waits.cuh.
//
// Upper-case numbers (HIDDEN, SYM_RECORD ...) come from moecomm/layout.py: literals on a GPU, a
// table on a CPU.
//
// A handle owns a slot. Its epoch grows by one each time the slot is used; flags hold epochs, so
// nothing is ever reset and a replayed CUDA graph needs no new arguments:
//   head[slot][source rank]      written by that source in dispatch_send
//   record_flag[slot][group][i]  record i of that group is complete    (dispatch_send)
//   ack[slot][rank]              that rank has read all our records    (combine_send, release)
//   combine_flag[slot][t][place] a row came back for our token t       (combine_send)
// A source overwrites records once the ack of the slot's previous epoch is there. A combine row
// needs no ack of its own: its source sent the slot's new head after it had read the old rows,
// and every rank waits for all heads in dispatch_recv, before its combine_send.
#pragma once
#include "common.cuh"

#define LAYOUT_BATCHED 0
#define LAYOUT_GROUPED 1
#define LAYOUT_RANK 2

#define PHASE_DISPATCH_SEND 0u
#define PHASE_DISPATCH_RECV 1u
#define PHASE_COMBINE_SEND 2u
#define PHASE_COMBINE_RECV 3u

// Mirrored field for field by moecomm/kernels/args.py.
struct Args {
    u64 local;        // this rank's workspace (layout.py: local)
    u64 symmetric;    // this rank's part of what peers write to
    u64 status;       // three Status records in memory the host reads
    u64 rank;
    u64 slot;
    u64 num_local;    // experts here
    u64 timeout_ns;
    u64 x;            // dispatch_send: input rows
    u64 x_stride;     // bytes
    u64 x_aligned;    // rows start on 16-byte boundaries
    u64 x_scale;      // float32, or 0
    u64 x_scale_row_stride;  // bytes
    u64 x_scale_col_stride;
    u64 topk_idx;     // [T, K]
    u64 topk_idx_stride;     // bytes
    u64 topk_idx_bytes;      // 4 or 8 an element
    u64 topk_weights; // float32 [T, K], or 0
    u64 topk_weights_stride; // bytes
    u64 num_tokens;   // int32 [1], or 0
    u64 max_rows;     // rows of x
    u64 y;            // combine_send: expert output rows
    u64 y_stride;
    u64 y_aligned;
    u64 out;          // combine_recv
    u64 out_stride;
    u64 out_aligned;
    u64 accumulate;
    u64 remote_flags;  // words shared with the mover of remote peers' bytes, or 0
    u64 remote_bulk;   // staging and landing areas, or 0
    u64 network_bulk;  // where the network has them: the same place, but with a bounce
    u64 beside;        // 0, or push and pull run on streams of their own: number of the ticket
};

// What the host reads after a launch: [0] what broke the communicator, [1] a bad value, [2] an
// overflow. `code` is written last.
struct Status {
    u64 code;
    u64 phase;
    u64 rank;      // who noticed
    u64 peer;      // who did not come; the expert or rank of an overflow; the token of a bad value
    u64 epoch;
    u64 expected;  // also: rows needed
    u64 seen;      // also: capacity; the bad value
    u64 slot;
};
#define STATUS_FAILURE 0u
#define STATUS_VALUE 1u
#define STATUS_OVERFLOW 2u
#define CLAIM_ANSWERED 3u  // beside the claims of these three: see waits.cuh
#define CODE_TIMEOUT 1u
#define CODE_ABORTED 2u
#define CODE_BAD_EXPERT 3u
#define CODE_BAD_NUM_TOKENS 4u
#define CODE_OVERFLOW 5u

// Slot k of token t's weights as the caller gave them.
DEVICE float given_weight(const Args& a, u32 t, u32 k)
{
    return ld(reinterpret_cast<const float*>(a.topk_weights + t * a.topk_weights_stride) + k);
}

// ---- addresses ------------------------------------------------------------------------------
template <class T>
DEVICE T* local_at(const Args& a, u64 offset, u64 index)
{
    return reinterpret_cast<T*>(a.local + offset) + index;
}

DEVICE u64 peer_base(const Args& a, u64 rank) { return ld(local_at<u64>(a, LOC_PEERS, rank)); }

DEVICE u64* ack_flag(u64 base, const Args& a, u64 reader)
{
    return reinterpret_cast<u64*>(base + SYM_ACK) + a.slot * NUM_RANKS + reader;
}

DEVICE u64* head_words(u64 base, const Args& a, u64 source)
{
    return reinterpret_cast<u64*>(base + SYM_HEAD) + (a.slot * NUM_RANKS + source) * HEAD_WORDS;
}

// A source of records is a group, or with remote peers a rank (layout.py: num_sources).
DEVICE u64 record_number(const Args& a, u64 source, u64 i)
{
    return (a.slot * NUM_SOURCES + source) * SOURCE_TOKENS + i;
}

DEVICE u64* record_flag(u64 base, const Args& a, u64 source, u64 i)
{
    return reinterpret_cast<u64*>(base + SYM_RECORD_FLAG) + record_number(a, source, i);
}

DEVICE u64 record_at(u64 base, const Args& a, u64 source, u64 i)
{
    return base + SYM_RECORD + record_number(a, source, i) * RECORD_BYTES;
}

DEVICE u64 place_number(const Args& a, u64 token, u64 place)
{
    return (a.slot * MAX_TOKENS + token) * PLACES + place;
}

DEVICE u64* combine_flag(u64 base, const Args& a, u64 token, u64 place)
{
    return reinterpret_cast<u64*>(base + SYM_COMBINE_FLAG) + place_number(a, token, place);
}

DEVICE u64 combine_row(u64 base, const Args& a, u64 token, u64 place)
{
    return base + SYM_COMBINE_ROW + place_number(a, token, place) * COMBINE_STRIDE;
}

// Two words a slot. `sent`: the epoch that dispatch_send gave this use of the slot; the combine
// stages read it. `read`: the last epoch whose records this rank has read, set by combine_send or
// release; both dispatch stages count on from it. No stage reads the word that it writes, and the
// stages that write wait for all earlier kernels first: so no block can see its word change. (Pull
// beside the stages may: bounce_pull.cuh.)
DEVICE u64* sent_word(const Args& a) { return local_at<u64>(a, LOC_EPOCH, 2 * a.slot); }
DEVICE u64* read_word(const Args& a) { return local_at<u64>(a, LOC_EPOCH, 2 * a.slot + 1); }

#include "remote.cuh"

// The first stage after dispatch_recv: this rank has read its records of `epoch`. The last warp
// of block 0 says so; the others go on.
DEVICE void acknowledge(const Args& a, u64 epoch)
{
    if (blockIdx.x > 0 || warp_id() != num_warps() - 1) return;
    if (lane_id() == 0) st_relaxed_sys(read_word(a), epoch);
    for (u64 r = lane_id(); r < NUM_RANKS; r += WARP_SIZE) {
        if (is_remote(a, r)) {
            if (REMOTE == 2) put_word(a, r, arrived_word(a, a.rank, CHANNEL_ACK), epoch);
            continue;
        }
        st_release_sys(ack_flag(peer_base(a, r), a, a.rank), epoch);
    }
}

// ---- meta of one record: u32 words ------------------------------------------------------------
#define META_TOKEN 0u   // row number at the source
#define META_PLACE 1u   // where a per-rank combine row goes
#define META_GROUP 2u   // source group
#define META_ROW 3u     // remote peers: number of the first row that goes back to the group
#define META_EXPERT (4u)              // + k: local expert, or NO_EXPERT
#define META_INDEX (4u + TOP_K)       // + k: place among this group's rows of that expert
#define META_WEIGHT (4u + 2 * TOP_K)  // + k: float32
#define NO_EXPERT 0xffffffffu

// ---- experts ----------------------------------------------------------------------------------
// The first EXPERTS_EXTRA ranks host one expert more than the others (layout.py: expert_range).
DEVICE u32 expert_rank(u32 expert)
{
    const u32 boundary = EXPERTS_EXTRA * (EXPERTS_SHARE + 1);
    if (expert < boundary) return expert / (u32)(EXPERTS_SHARE + 1);
    return EXPERTS_EXTRA + (expert - boundary) / (u32)(EXPERTS_SHARE ? EXPERTS_SHARE : 1);
}

DEVICE u32 rank_first_expert(u32 rank)
{
    return rank * EXPERTS_SHARE + (rank < EXPERTS_EXTRA ? rank : EXPERTS_EXTRA);
}

DEVICE u32 rank_num_experts(u32 rank) { return EXPERTS_SHARE + (rank < EXPERTS_EXTRA ? 1 : 0); }

// ---- count words: the epoch's low half above, a count below ------------------------------------
DEVICE u64 count_word(u64 epoch, u32 count) { return epoch << 32 | count; }
DEVICE u32 count_epoch(u64 word) { return (u32)(word >> 32); }
DEVICE u32 count_value(u64 word) { return (u32)word; }

// ---- reports ------------------------------------------------------------------------------------
// One thread of one launch fills a record: the first to put this slot and epoch into the claim.
DEVICE bool claim_status(const Args& a, u32 which, u64 epoch)
{
    u64* claim = local_at<u64>(a, LOC_CLAIM, which);
    const u64 mine = epoch << 16 | a.slot << 1 | 1;
    const u64 before = ld_relaxed_sys(claim);
    return before != mine && cas_relaxed_sys(claim, before, mine) == before;
}

DEVICE void report(const Args& a, u32 which, Status s)
{
    u64* words = reinterpret_cast<u64*>(a.status) + which * (sizeof(Status) / sizeof(u64));
    st_relaxed_sys(words + 1, s.phase);
    st_relaxed_sys(words + 2, s.rank);
    st_relaxed_sys(words + 3, s.peer);
    st_relaxed_sys(words + 4, s.epoch);
    st_relaxed_sys(words + 5, s.expected);
    st_relaxed_sys(words + 6, s.seen);
    st_relaxed_sys(words + 7, s.slot);
    st_release_sys(words, s.code);
}
