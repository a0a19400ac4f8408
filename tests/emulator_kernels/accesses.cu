// Small patterns of access to one area of 1024 bytes, by 2 blocks of 64 threads.
#include "emulator.hpp"

struct Args {
    unsigned char* area;
    u64 rank;
    u64 turn;
};

static u32 number() { return blockIdx.x * blockDim.x + threadIdx.x; }
static u32 count() { return gridDim.x * blockDim.x; }
static u32* words(const Args& a) { return (u32*)a.area; }

extern "C" __global__ void own_bytes(Args a)
{
    for (u32 i = number(); i < 1024; i += count()) st(a.area + i, (unsigned char)i);
    for (u32 i = number(); i < 1024; i += count()) ld(a.area + i);
}

extern "C" __global__ void own_halves(Args a)
{
    for (u32 i = number(); i < 512; i += count()) st((u16*)a.area + i, (u16)i);
    for (u32 i = number(); i < 512; i += count()) ld((u16*)a.area + i);
}

extern "C" __global__ void shared_byte(Args a)
{
    st(a.area + number() / 2, (unsigned char)1);
}

// Bytes 0 to 2 of each word are written by one thread, which then reads the word.
extern "C" __global__ void own_bytes_read_words(Args a)
{
    for (u32 b = 0; b < 3; ++b) st(a.area + 4 * number() + b, (unsigned char)b);
    ld(words(a) + number());
}

extern "C" __global__ void read_all(Args a)
{
    for (u32 i = number(); i < 64; i += count()) ld_v4(a.area + 16 * i);
}

extern "C" __global__ void read_next_write_own(Args a)
{
    ld(words(a) + number());
    st(words(a) + number(), 1u);
}

extern "C" __global__ void only_atomics(Args a)
{
    atomicAdd(words(a), 1u);
    atomicMax(words(a) + 1, number());
    atomic_inc_acq_rel_gpu(words(a) + 2, 100);
    atomicCAS(words(a) + 3, 0u, number());
}

// The ranks take turns with the area: ordered if their hosts tell each other in between.
extern "C" __global__ void turns(Args a)
{
    if (a.turn % 2 != a.rank) return;
    if (a.turn) ld(words(a) + number());
    st(words(a) + number(), (u32)a.turn);
}

extern "C" __global__ void many_readers(Args a)
{
    u32* own = words(a) + 64 * blockIdx.x;
    for (u32 i = 0; i < 8; ++i) ld(own + i);
    __syncthreads();
    if (threadIdx.x < 8) st(own + threadIdx.x, 1u);
}

extern "C" __global__ void many_readers_no_barrier(Args a)
{
    u32* own = words(a) + 64 * blockIdx.x;
    for (u32 i = 0; i < 8; ++i) ld(own + i);
    if (threadIdx.x == 40) st(own, 1u);
}

template <bool kBoth>
static void pass_by_fences(const Args& a)
{
    u64* flag = (u64*)(a.area + 512);
    if (number() == 0) {
        st(words(a), 1u);
        __threadfence_system();
        st_relaxed_sys(flag, 1);
    } else if (number() == 64) {
        for (u32 i = 0; ld_relaxed_sys(flag) == 0; ++i) poll_pause(i);
        if (kBoth) __threadfence_system();
        ld(words(a));
    }
}
extern "C" __global__ void fences(Args a) { pass_by_fences<true>(a); }
extern "C" __global__ void one_fence(Args a) { pass_by_fences<false>(a); }

extern "C" __global__ void sum_then_read(Args a)
{
    u32* own = words(a) + 64 * blockIdx.x;
    atomicAdd(own, 1u);
    __syncthreads();
    ld(own);
    __syncthreads();
    if (threadIdx.x == 0) st(own, 0u);
    __syncthreads();
    atomicAdd(own, 1u);
}

extern "C" __global__ void sum_and_read(Args a)
{
    atomicAdd(words(a), 1u);
    ld(words(a));
}

extern "C" __global__ void plain_flag(Args a)
{
    u64* flag = (u64*)(a.area + 512);
    if (number() == 0) st(flag, (u64)1);
    if (number() == 64)
        for (u32 i = 0; ld_acquire_sys(flag) == 0; ++i) poll_pause(i);
}

extern "C" __global__ void misaligned(Args a)
{
    if (number() == 5) ld_v4(a.area + 8);
}

// ---- shared memory: no wrappers -----------------------------------------------------------------
extern "C" __global__ void shared_rotate(Args)
{
    DYNAMIC_SHARED(u32, shared);
    shared[threadIdx.x] = threadIdx.x;
    for (u32 turn = 0; turn < 3; ++turn) {
        __syncthreads();
        const u32 next = shared[(threadIdx.x + 1) % blockDim.x];
        __syncthreads();
        shared[threadIdx.x] = next;
    }
}

extern "C" __global__ void shared_in_warp(Args)
{
    DYNAMIC_SHARED(volatile u32, shared);
    const u32 first = threadIdx.x / 32 * 32;
    if (threadIdx.x == first) shared[first] = 1;
    __syncwarp();
    if (shared[first] != 1) shared[threadIdx.x] = 2;
    __syncwarp();
    if (threadIdx.x == first + 31) shared[first] = 3;
}

extern "C" __global__ void shared_counter(Args)
{
    DYNAMIC_SHARED(u32, shared);
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    atomicAdd(shared, 1u);
    __syncthreads();
    if (*shared != blockDim.x) shared[1] = 1;
}

extern "C" __global__ void shared_no_barrier(Args)
{
    DYNAMIC_SHARED(volatile u32, shared);
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    shared[threadIdx.x] = 2 * threadIdx.x;
    if (shared[threadIdx.x ^ 32] == 7) shared[threadIdx.x] = 0;
}

extern "C" __global__ void shared_no_syncwarp(Args)
{
    DYNAMIC_SHARED(volatile u32, shared);
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 3) shared[4] = 1;
    if (threadIdx.x == 4 && shared[4] == 2) shared[4] = 2;
}

extern "C" __global__ void shared_unwritten(Args)
{
    DYNAMIC_SHARED(volatile u32, shared);
    if (shared[threadIdx.x] == 1) shared[threadIdx.x] = 2;
}

extern "C" __global__ void shared_past_the_end(Args)
{
    DYNAMIC_SHARED(volatile unsigned char, shared);
    if (threadIdx.x == 0) *(volatile u64*)(shared + 248) = 1;
}

// Memory that peers share, read without a wrapper.
extern "C" __global__ void unwrapped(Args a)
{
    if (number() == 0) st(words(a), 1u);
    if (number() == 64 && *(volatile u32*)a.area == 9) st(words(a) + 1, 1u);
}

struct Row {
    u32 words[48];
};

// Whole structures and long runs of zeros, which compilers copy and fill by library calls.
extern "C" __global__ void shared_structures(Args a)
{
    DYNAMIC_SHARED(Row, rows);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 48 + (u32)a.turn; ++i) rows[0].words[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 1) rows[1] = rows[0];
    __syncthreads();
    if (rows[1].words[threadIdx.x % 48]) rows[0] = rows[1];
}

extern "C" __global__ void shared_structures_no_barrier(Args a)
{
    DYNAMIC_SHARED(Row, rows);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 48 + (u32)a.turn; ++i) rows[0].words[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 1) rows[1] = rows[0];
    if (threadIdx.x == 2) rows[0] = Row();
}
