// A small all-to-all with one slot per (destination, source), reused by every epoch: the right
// version, and, with MUTATION set, versions with one mistake each.
#include "emulator.hpp"

#define NO_MUTATION 0
#define MISSING_RELEASE 1
#define MISSING_ACQUIRE 2
#define DROPPED_BARRIER 3
#define DROPPED_SYNCWARP 4
#define REUSE_BEFORE_ACK 5
#define STALE_WORD 6
#define UNWRITTEN_WORD 7
#define SHUFFLE_ONLY 8
#ifndef MUTATION
#define MUTATION NO_MUTATION
#endif

#define NUM_RANKS (emu::config()[0])
#define WORDS (emu::config()[1])  // of one slot

struct Args {
    u64 slots[8];  // of each rank: u32 [source][WORDS]
    u64 flags[8];  // u64 [source]: the epoch whose payload is in the slot
    u64 acks[8];   // u64 [reader]: the epoch that the reader has read
    u64 out;       // u32 [source][WORDS] of this rank
    u64 ticket;    // u32
    u64 rank;
    u64 epoch;
};

static void wait_for(const u64* flag, u64 epoch, bool acquire)
{
    note_wait(flag, epoch);
    for (u32 spins = 0;; ++spins) {
        if ((acquire ? ld_acquire_sys(flag) : ld_relaxed_sys(flag)) >= epoch) return;
        poll_pause(spins);
    }
}

static u32 payload(u64 from, u64 to, u64 word, u64 epoch)
{
    return (u32)(((epoch * 8 + from) * 8 + to) * 65536 + word);
}

static bool written(u64 word, u64 epoch)
{
    if (MUTATION == STALE_WORD && epoch > 1) return word + 1 < WORDS;
    if (MUTATION == UNWRITTEN_WORD) return word + 1 < WORDS;
    return true;
}

extern "C" __global__ void send(Args a)
{
    note_epoch(a.epoch);
    for (u64 to = blockIdx.x; to < NUM_RANKS; to += gridDim.x) {
        if (threadIdx.x == 0 && MUTATION != REUSE_BEFORE_ACK)
            wait_for((u64*)a.acks[a.rank] + to, a.epoch - 1, true);
        __syncthreads();
        u32* slot = (u32*)a.slots[to] + a.rank * WORDS;
        for (u64 w = threadIdx.x; w < WORDS; w += blockDim.x)
            if (written(w, a.epoch)) st(slot + w, payload(a.rank, to, w, a.epoch));
        if (MUTATION != DROPPED_BARRIER) __syncthreads();
        u64* flag = (u64*)a.flags[to] + a.rank;
        if (threadIdx.x == 0) {
            if (MUTATION == MISSING_RELEASE)
                st_relaxed_sys(flag, a.epoch);
            else
                st_release_sys(flag, a.epoch);
        }
    }
}

extern "C" __global__ void receive(Args a)
{
    note_epoch(a.epoch);
    for (u64 from = blockIdx.x; from < NUM_RANKS; from += gridDim.x) {
        if (threadIdx.x == 0)
            wait_for((u64*)a.flags[a.rank] + from, a.epoch, MUTATION != MISSING_ACQUIRE);
        __syncthreads();
        const u32* slot = (u32*)a.slots[a.rank] + from * WORDS;
        for (u64 w = threadIdx.x; w < WORDS; w += blockDim.x)
            st((u32*)a.out + from * WORDS + w, ld(slot + w));
    }
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0)
        last = atomic_inc_acq_rel_gpu((u32*)a.ticket, gridDim.x - 1) == gridDim.x - 1;
    if (!__syncthreads_or(last)) return;
    for (u64 to = threadIdx.x; to < NUM_RANKS; to += blockDim.x)
        st_release_sys((u64*)a.acks[to] + a.rank, a.epoch);
}

// The same by warps: each sends to, and receives from, every NUM_WARPS-th rank.
extern "C" __global__ void send_warps(Args a)
{
    note_epoch(a.epoch);
    const u64 lane = threadIdx.x % 32, warps = blockDim.x / 32 * gridDim.x;
    for (u64 to = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; to < NUM_RANKS; to += warps) {
        if (lane == 0) wait_for((u64*)a.acks[a.rank] + to, a.epoch - 1, true);
        __syncwarp();
        u32* slot = (u32*)a.slots[to] + a.rank * WORDS;
        for (u64 w = lane; w < WORDS; w += 32) st(slot + w, payload(a.rank, to, w, a.epoch));
        if (MUTATION == SHUFFLE_ONLY)
            (void)__ballot_sync(0xffffffffu, 1);
        else if (MUTATION != DROPPED_SYNCWARP)
            __syncwarp();
        if (lane == 0) st_release_sys((u64*)a.flags[to] + a.rank, a.epoch);
    }
}
