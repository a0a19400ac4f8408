// combine_pull: a bounce: rows that have come back  →  where combine_recv reads them.
//
// Reads: in_row of the network, arrived.  Writes: own in_row, pulled.
#include "bounce_pull.cuh"

struct Returned {
    static const u32 HALF = HALF_COMBINE, PHASE = PHASE_COMBINE_RECV;

    // 0, of which nothing comes, for a step that overflowed.
    DEVICE static u64 present_epoch(const Args& a)
    {
        const u64 epoch = ld_relaxed_sys(sent_word(a));
        const bool none = CAPPED && ld_relaxed_sys(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch;
        return none ? 0 : epoch;
    }

    // One thread: a rank that owes nothing need not combine. In line the number of rows is of this
    // epoch; beside, it is once the rank has acknowledged that, for it has had our head. Rows
    // acknowledge, too. That spares the next dispatch_send a look at the host.
    DEVICE static bool has_come(const Args& a, u64 source, u64 epoch)
    {
        if (a.beside && !has_arrived(a, source, CHANNEL_ACK, epoch, PHASE)) return false;
        const bool owes = ld(return_count(a, source)) > 0;
        if (owes && !has_arrived(a, source, CHANNEL_ROWS, epoch, PHASE)) return false;
        if (owes || a.beside) st_release_sys(relay_word(a, source, CHANNEL_ROWS), epoch);
        return true;
    }

    DEVICE static void copy(const Args& a, u32* words)
    {
        u32 *base = words, *rows = words + NUM_RANKS;
        for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x) {
            // Beside, of a handle that was closed early, these may change meanwhile.
            base[r] = min(ld(local_at<u32>(a, LOC_RETURN_BASE, pair_number(a, r))), (u32)LANDING_ROWS);
            rows[r] = is_remote(a, r) ? min(ld(return_count(a, r)), (u32)LANDING_ROWS - base[r]) : 0;
        }
        __syncthreads();
        Copier copier;
        for (u32 r = 0; r < NUM_RANKS; ++r) {
            const u64 first = landed_row(a, base[r]);
            if (rows[r]) copier.span(first, at_network(a, first), rows[r] * COMBINE_STRIDE);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_pull(Args a)
{
    DYNAMIC_SHARED(u64, words);
    pull<Returned>(a, words);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for those before it
}
