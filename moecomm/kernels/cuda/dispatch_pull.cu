// dispatch_pull: a bounce: heads and records that have come  →  where dispatch_recv reads them.
//
// Reads: in_head and in_record of the network, arrived.  Writes: own in_head, in_record, pulled.
#include "bounce_pull.cuh"

struct Dispatched {
    static const u32 HALF = HALF_DISPATCH, PHASE = PHASE_DISPATCH_RECV;

    // May run beside dispatch_send, as dispatch_recv.
    DEVICE static u64 present_epoch(const Args& a) { return ld_relaxed_sys(read_word(a)) + 1; }

    // One thread: all of a remote rank's records; notes how many.
    DEVICE static bool has_come(const Args& a, u64 source, u64 epoch)
    {
        if (!has_arrived(a, source, CHANNEL_HEAD, epoch, PHASE)) return false;
        const u64* head = (const u64*)at_network(a, (u64)in_head(a, source));
        const u32 records = count_value(ld(head + HEAD_SHARE));
        st(pull_count(a, source), records);
        if (records > 0 && !has_arrived(a, source, CHANNEL_RECORDS, epoch, PHASE)) return false;
        return records <= PRIVATE_RECORDS || has_arrived(a, source, CHANNEL_RECORDS + 1, epoch, PHASE);
    }

    DEVICE static void copy(const Args& a, u32* records)
    {
        for (u32 r = threadIdx.x; r < NUM_RANKS; r += blockDim.x)
            records[r] = is_remote(a, r) ? ld(pull_count(a, r)) + 1 : 0;
        __syncthreads();
        Copier copier;
        for (u32 r = 0; r < NUM_RANKS; ++r) {
            if (records[r] == 0) continue;
            const u64 head = (u64)in_head(a, r), first = landed_record(a, r, 0);
            copier.span(head, at_network(a, head), HEAD_BYTES);
            copier.span(first, at_network(a, first), (records[r] - 1) * RECORD_BYTES);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_pull(Args a)
{
    DYNAMIC_SHARED(u64, words);
    pull<Dispatched>(a, words);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for those before it
}
