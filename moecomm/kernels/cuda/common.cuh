// The memory model and the few machine instructions that all stages stand on.
//
// Device code never dereferences memory that another thread block or rank may touch: it goes
// through these wrappers. On a GPU each is one instruction; on a CPU the emulator provides the
// same names, yields to other threads inside them, and checks what they read and order.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define FULL_WARP 0xffffffffu
#define WARP_SIZE 32u
#define POLLS_AT_ONCE 4u   // then a waiting thread begins to sleep in between
#define POLL_NS 100u
#define CHUNKS_AT_ONCE 4u  // loads that a thread has under way before it stores

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")  // where an array must stay in registers
#define AS_PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) AS_PRAGMA(unroll n)  // loads that wait for nothing come together
#define NO_UNROLL _Pragma("unroll 1")  // off the fast path: registers matter more
#define DYNAMIC_SHARED(type, name)                            \
    extern __shared__ __align__(16) unsigned char moe_smem[]; \
    type* name = reinterpret_cast<type*>(moe_smem)

// ---- flags: one 8-byte word, system scope, because peers are other GPUs -------------------
DEVICE u64 ld_acquire_sys(const u64* p)
{
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void st_release_sys(u64* p, u64 v)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

DEVICE u64 ld_relaxed_sys(const u64* p)
{
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void st_relaxed_sys(u64* p, u64 v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

DEVICE u64 cas_relaxed_sys(u64* p, u64 compare, u64 value)
{
    u64 v;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(v)
                 : "l"(p), "l"(compare), "l"(value)
                 : "memory");
    return v;
}

// ---- counters: device scope, between the blocks of one launch -----------------------------
DEVICE u32 atomic_add_acq_rel_gpu(u32* p, u32 value)
{
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(p), "r"(value)
                 : "memory");
    return v;
}

// Adds 1, or begins anew from 0 where it holds `wrap`. What it held before.
DEVICE u32 atomic_inc_acq_rel_gpu(u32* p, u32 wrap)
{
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(p), "r"(wrap)
                 : "memory");
    return v;
}

// ---- payload ------------------------------------------------------------------------------
// Rows are read once: keep them out of L1. Not `ld.global.nc`: a received row was written while
// this kernel ran, which the non-coherent path does not allow.
DEVICE uint4 ld_v4(const void* p)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE void st_v4(void* p, uint4 v)
{
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

template <class T>
DEVICE T ld(const T* p)
{
    return *p;
}

template <class T>
DEVICE void st(T* p, T v)
{
    *p = v;
}

// ---- waiting ------------------------------------------------------------------------------
DEVICE u64 global_timer_ns()
{
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

// One turn of a waiting loop. True when it is time to look at the clock and the abort word:
// every 256 polls, about 0.2 ms of polling local memory.
#define FIRST_LOOK 256u
DEVICE bool poll_pause(u32 spins)
{
    if (spins > 1024) __nanosleep(64);
    return (spins & (FIRST_LOOK - 1)) == 0;
}

// The same where thousands of warps wait, and for long: they must leave memory to those they wait for.
DEVICE bool poll_rarely(u32 spins)
{
    if (spins > POLLS_AT_ONCE) __nanosleep(POLL_NS);
    return (spins & (FIRST_LOOK - 1)) == 0;
}

// ---- programmatic dependent launch: a kernel may start before the one ahead of it has ended -------
// A receiving half starts while its sending half still runs, so that it is there when data comes.
// Everything else waits for all earlier kernels first. Without the launch attribute, and on older
// GPUs, both are nothing.
DEVICE void wait_for_earlier_kernels()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What the emulator is told and a GPU need not know.
DEVICE void note_epoch(u64) {}
DEVICE void note_wait(const u64*, u64) {}

#else
#define DEVICE inline
#define UNROLL
#define UNROLL_BY(n)
#define NO_UNROLL
#include "emulator.hpp"
#define FIRST_LOOK 1u
DEVICE bool poll_rarely(u32 spins) { return poll_pause(spins); }
DEVICE void wait_for_earlier_kernels() {}
DEVICE void let_next_kernel_start() {}
#endif

// Reads and writes of one thread block's own shared words that other threads of the block wrote
// are ordered by __syncthreads and __syncwarp, as usual.

DEVICE u32 lane_id() { return threadIdx.x % WARP_SIZE; }
DEVICE u32 warp_id() { return threadIdx.x / WARP_SIZE; }
DEVICE u32 num_warps() { return blockDim.x / WARP_SIZE; }

// In the dispatch stages block 0 does what concerns all, and the others move rows; alone, it does both.
DEVICE bool is_row_block() { return blockIdx.x > 0 || gridDim.x == 1; }
DEVICE u32 num_row_blocks() { return gridDim.x > 1 ? gridDim.x - 1 : 1; }
DEVICE u32 row_block() { return gridDim.x > 1 ? blockIdx.x - 1 : 0; }

DEVICE u32 warp_sum(u32 value)
{
    for (u32 step = WARP_SIZE / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

// In place: values[i] = sum of values[0..i), values[n] = the sum of all. One whole warp, n + 1
// words of shared memory. Each value is first rounded up to a multiple of `align`.
DEVICE void warp_exclusive_scan(u32* values, u32 n, u32 align)
{
    u32 carry = 0;
    for (u32 first = 0; first < n; first += WARP_SIZE) {
        const u32 i = first + lane_id();
        u32 own = i < n ? (values[i] + align - 1) / align * align : 0;
        u32 sum = own;
        for (u32 step = 1; step < WARP_SIZE; step *= 2) {
            const u32 below = __shfl_up_sync(FULL_WARP, sum, step);
            if (lane_id() >= step) sum += below;
        }
        if (i < n) values[i] = carry + sum - own;
        carry += __shfl_sync(FULL_WARP, sum, WARP_SIZE - 1);
    }
    if (lane_id() == 0) values[n] = carry;
    __syncwarp();
}
