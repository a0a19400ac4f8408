// dispatch_push: a bounce: heads and staged records  →  where the network reads them.
//
// Block 0 takes heads and plan; then all blocks the private records, then the others, each rung as
// soon as it is over. A door behind which there is nothing for anybody is rung before the heads': peers
// answer without it, and if it came late, the next epoch's push, in a capture, might already have rung.
//
// Reads: own out_head, out_record, plan, rung.  Writes: the same areas for the network, plan, doors.
#include "bounce_push.cuh"

struct Staged {  // in shared memory; 0 for ranks that are not remote
    u32* first;  // [NUM_RANKS]
    u32* count;
    bool any, more;  // some rank has records; has more than are private
};

DEVICE Staged load_staged(const Args& a, u32* words)
{
    Staged s = {words, words + NUM_RANKS, false, false};
    u32 most = 0;  // that this thread sees
    for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) {
        const bool remote = is_remote(a, r);
        s.first[r] = remote ? (u32)ld(plan_word(a, r, PLAN_RECORD_FIRST)) : 0;
        s.count[r] = remote ? (u32)ld(plan_word(a, r, PLAN_RECORD_COUNT)) : 0;
        most = max(most, s.count[r]);
    }
    s.any = __syncthreads_or(most > 0);
    s.more = __syncthreads_or(most > PRIVATE_RECORDS);
    return s;
}

// One block.
DEVICE void push_heads(const Args& a)
{
    const u32 units = HEAD_BYTES / 16;
    for (u32 i = threadIdx.x; i < NUM_RANKS * units; i += blockDim.x) {
        if (!is_remote(a, i / units)) continue;
        const u64 from = (u64)out_head(a, 0) + i * 16ull;
        st_v4((void*)at_network(a, from), ld_v4((const void*)from));
    }
}

// Records [from, to) of those for each rank, as far as there are so many.
DEVICE void push_records(const Args& a, const Staged& s, u32 from, u32 to)
{
    Copier copier;
    for (u32 r = 0; r < NUM_RANKS; ++r) {
        const u32 last = min(s.count[r], to);
        if (last <= from) continue;
        const u64 source = staged_record(a, s.first[r] + from);
        copier.span(at_network(a, source), source, (last - from) * RECORD_BYTES);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_push(Args a)
{
    let_next_kernel_start();
    DYNAMIC_SHARED(u32, words);
    const u64 epoch = ld(rung_word(a, DOOR_HEAD));
    const bool some = ld(rung_word(a, DOOR_PRIVATE)) == epoch, all = ld(rung_word(a, DOOR_RECORDS)) == epoch;
    push_ticket(a, HALF_DISPATCH, epoch);
    if (epoch == ld(pushed_word(a, HALF_DISPATCH))) return;
    note_epoch(epoch);
    const Staged s = load_staged(a, words);
    if (blockIdx.x == 0) {
        push_plan(a, PLAN_RECORD_FIRST, PLAN_RECORD_COUNT + 1);
        push_heads(a);
    }
    if (push_over(a, DOOR_HEAD)) {
        st(pushed_word(a, HALF_DISPATCH), epoch);
        if (!s.any) push_ring(a, DOOR_PRIVATE, epoch);
        if (!s.more) push_ring(a, DOOR_RECORDS, epoch);
        push_ring(a, DOOR_HEAD, epoch);
    }
    if (!some || !s.any) return;
    push_records(a, s, 0, (u32)PRIVATE_RECORDS);
    if (push_over(a, DOOR_PRIVATE)) push_ring(a, DOOR_PRIVATE, epoch);
    if (!all || !s.more) return;
    push_records(a, s, (u32)PRIVATE_RECORDS, 0xffffffffu);
    if (push_over(a, DOOR_RECORDS)) push_ring(a, DOOR_RECORDS, epoch);
}
