// Kernels whose results show who ran when, and kernels that wait.
#include "emulator.hpp"

struct Args {
    u64 memory[8];  // of each rank: [0] flag, [1] counter, [2..] payload; u64
    u64* out;       // [8]
    u64 rank;
    u64 num_ranks;
    u64 epoch;
    u64 timeout_ns;  // 0: none
};

static u64* flag_of(const Args& a, u64 rank) { return (u64*)a.memory[rank]; }

// out[thread][turn]: its place in the order of all threads' turns.
extern "C" __global__ void order(Args a)
{
    for (u32 turn = 0; turn < 4; ++turn) {
        const u64 place = atomicAdd(flag_of(a, 0) + 1, (u64)1);
        st(a.out + (blockIdx.x * blockDim.x + threadIdx.x) * 4 + turn, place);
    }
}

static bool wait_for(const Args& a, const u64* word, u64 value)
{
    note_wait(word, value);
    const u64 start = global_timer_ns();
    for (u32 spins = 0; ld_acquire_sys(word) < value; ++spins) {
        if (poll_pause(spins) && a.timeout_ns && global_timer_ns() - start > a.timeout_ns)
            return false;
    }
    return true;
}

// Passes a payload of 64 words to the next rank. out: {1: it came, time, its sum}.
extern "C" __global__ void ring(Args a)
{
    note_epoch(a.epoch);
    const u64 next = (a.rank + 1) % a.num_ranks;
    st(flag_of(a, next) + 2 + threadIdx.x, a.epoch * 100 + threadIdx.x);
#ifndef NO_BARRIER
    __syncthreads();
#endif
    if (threadIdx.x == 0) {
#ifdef RELAXED_FLAG
        st_relaxed_sys(flag_of(a, next), a.epoch);
#else
        st_release_sys(flag_of(a, next), a.epoch);
#endif
    }
    const u64 start = global_timer_ns();
    const bool came = __syncthreads_and(threadIdx.x || wait_for(a, flag_of(a, a.rank), a.epoch));
    u64 sum = came ? ld(flag_of(a, a.rank) + 2 + threadIdx.x) : 0;
    for (u32 step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, (int)step);
    if (threadIdx.x == 0) {
        st(a.out, (u64)came);
        st(a.out + 1, global_timer_ns() - start);
    }
    if (threadIdx.x % 32 == 0) st(a.out + 2 + threadIdx.x / 32, sum);
}

// Everybody adds one to everybody's counter, and waits for all.
extern "C" __global__ void count(Args a)
{
    if (threadIdx.x < a.num_ranks) red_release_sys_add(flag_of(a, threadIdx.x) + 1, 1);
    if (threadIdx.x == 0) {
        const bool came = wait_for(a, flag_of(a, a.rank) + 1, a.num_ranks);
        st(a.out, (u64)came);
    }
}

// Stores 1, then 2, a while apart.
extern "C" __global__ void two_stores(Args a)
{
    if (threadIdx.x) return;
    st_release_sys(flag_of(a, 0), 1);
    for (u32 i = 0; i < 20; ++i) poll_pause(i);
    st_release_sys(flag_of(a, 0), 2);
    for (u32 i = 0; i < 200; ++i) poll_pause(i);
}

// Waits without poll_pause.
extern "C" __global__ void impatient(Args a)
{
    while (ld_acquire_sys(flag_of(a, a.rank)) < a.epoch) {
    }
    st(a.out, (u64)1);
}

extern "C" __global__ void set_flag(Args a)
{
    for (u32 i = 0; i < 20; ++i) poll_pause(i);
    st_release_sys(flag_of(a, a.epoch >> 32), (u32)a.epoch);
}

extern "C" __global__ void clock(Args a)
{
    const u64 start = global_timer_ns();
    u64 now = start;
    while (now - start < a.timeout_ns) now = global_timer_ns();  // no poll_pause
    st(a.out, now - start);
}
