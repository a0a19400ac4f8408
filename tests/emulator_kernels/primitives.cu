// One kernel per primitive. `in` and `out` are indexed by global thread number unless said.
#include "emulator.hpp"

struct Args {
    const u32* in;
    u32* out;
    u64* words;
    u32 mask;   // lanes that take part
    u32 param;
    u32 width;
    u32 exiting;  // lanes or threads that leave at once
};

static u32 thread_number()
{
    return (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) *
               (blockDim.x * blockDim.y * blockDim.z) +
           threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

static bool takes_part(const Args& a) { return a.mask >> (threadIdx.x % 32) & 1; }

extern "C" __global__ void indices(Args a)
{
    u32* out = a.out + 12 * thread_number();
    out[0] = threadIdx.x, out[1] = threadIdx.y, out[2] = threadIdx.z;
    out[3] = blockIdx.x, out[4] = blockIdx.y, out[5] = blockIdx.z;
    out[6] = blockDim.x, out[7] = blockDim.y, out[8] = blockDim.z;
    out[9] = gridDim.x, out[10] = gridDim.y, out[11] = gridDim.z;
}

#define WARP_KERNEL(name, expression)                                       \
    extern "C" __global__ void name(Args a)                                 \
    {                                                                       \
        if (a.exiting >> (threadIdx.x % 32) & 1) return;                    \
        if (!takes_part(a)) return;                                         \
        const u32 i = thread_number();                                      \
        const u32 v = a.in[i];                                              \
        a.out[i] = (u32)(expression);                                       \
    }
WARP_KERNEL(shuffle, __shfl_sync(a.mask, v, (int)a.param, (int)a.width))
WARP_KERNEL(shuffle_up, __shfl_up_sync(a.mask, v, a.param, (int)a.width))
WARP_KERNEL(shuffle_down, __shfl_down_sync(a.mask, v, a.param, (int)a.width))
WARP_KERNEL(shuffle_xor, __shfl_xor_sync(a.mask, v, (int)a.param, (int)a.width))
WARP_KERNEL(ballot, __ballot_sync(a.mask, v & 1))
WARP_KERNEL(any_of, __any_sync(a.mask, v == a.param))
WARP_KERNEL(all_of, __all_sync(a.mask, v != a.param))
WARP_KERNEL(match_any, __match_any_sync(a.mask, v % 5))
WARP_KERNEL(reduce_add, __reduce_add_sync(a.mask, v))
WARP_KERNEL(reduce_max, __reduce_max_sync(a.mask, (int)v - 50))
WARP_KERNEL(reduce_min, __reduce_min_sync(a.mask, (int)v - 50))
WARP_KERNEL(shuffle_float, __float_as_uint(__shfl_xor_sync(a.mask, (float)v, 1)))

extern "C" __global__ void shuffle_wide(Args a)
{
    const u32 i = thread_number();
    const double sum = (double)a.in[i] + __shfl_xor_sync(0xffffffffu, (double)a.in[i] * 0.5, 16);
    a.words[i] = __shfl_sync(0xffffffffu, (u64)a.in[i] << 40, (int)a.param);
    a.out[i] = (u32)sum;
}

// Half warps in collectives of their own, at the same time, and then together.
extern "C" __global__ void half_warps(Args a)
{
    const u32 i = thread_number(), lane = threadIdx.x % 32;
    u32 sum = a.in[i];
    const u32 half = lane < 16 ? 0xffffu : 0xffff0000u;
    const u32 turns = lane < 16 ? 4 : 1;  // the halves run apart
    for (u32 n = 0; n < turns; ++n)
        for (u32 step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(half, sum, (int)step);
    a.out[i] = sum + __shfl_xor_sync(0xffffffffu, sum, 16);
}

// Threads from `exiting` on return before the barriers.
extern "C" __global__ void barriers(Args a)
{
    DYNAMIC_SHARED(u32, shared);
    if (threadIdx.x >= a.exiting) return;
    const u32 n = a.exiting < blockDim.x ? a.exiting : blockDim.x;
    u32 value = a.in[thread_number()];
    for (u32 turn = 0; turn < 5; ++turn) {
        shared[threadIdx.x] = value;
        __syncthreads();
        value = shared[(threadIdx.x + 1) % n] + 1;
        __syncthreads();
    }
    const u32 odd = value & 1;
    a.out[thread_number()] = value << 8 | (u32)__syncthreads_count(odd) << 2 |
                             (u32)__syncthreads_or(value == a.param) << 1 |
                             (u32)(__syncthreads_and(value != a.param) != 0);
}

// The last thread leaves while the others wait.
extern "C" __global__ void late_exit(Args a)
{
    if (threadIdx.x == blockDim.x - 1) {
        for (u32 i = 0; i < a.param; ++i) poll_pause(i);
        return;
    }
    __syncthreads();
    __syncwarp();
    a.out[thread_number()] = 1;
}

extern "C" __global__ void poison(Args a)
{
    DYNAMIC_SHARED(u32, shared);
    a.out[thread_number()] = shared[threadIdx.x];
    __syncthreads();
    shared[threadIdx.x] = 0;
}

extern "C" __global__ void atomics(Args a)
{
    u32* p = a.out;
    const u32 v = a.in[thread_number()];
    atomicAdd(p + 0, v);
    atomicMax(p + 1, v);
    atomicMin(p + 2, v);
    atomicInc(p + 3, 9);
    atomicOr(p + 4, 1u << v % 32);
    atomicAdd((float*)p + 5, 0.5f);
    atomicSub(p + 6, 1u);
    for (u32 old = p[7], seen; (seen = atomicCAS(p + 7, old, old + v)) != old;) old = seen;
    if (v == 77) atomicExch(p + 8, v);
    atomicAdd(a.words, (u64)v << 32);
    atomic_inc_acq_rel_gpu(p + 9, 6);
    red_release_sys_add(a.words + 1, v);
    u64 compare = ld_relaxed_sys(a.words + 2);
    while (true) {
        const u64 seen = cas_relaxed_sys(a.words + 2, compare, compare + 2);
        if (seen == compare) break;
        compare = seen;
    }
}

// Bytes, halves, words and vectors, each thread its own.
extern "C" __global__ void memory(Args a)
{
    const u32 i = thread_number();
    const unsigned char* in = (const unsigned char*)a.in + 32 * i;
    unsigned char* out = (unsigned char*)a.out + 32 * i;
    st(out, ld(in));
    st((u8*)out + 1, ld((const u8*)in + 1));
    st((u16*)(out + 2), ld((const u16*)(in + 2)));
    st((float*)(out + 4), ld((const float*)(in + 4)));
    st((u64*)(out + 8), ld((const u64*)(in + 8)));
    st_v4(out + 16, ld_v4(in + 16));
}

extern "C" __global__ void bits(Args a)
{
    const u32 v = a.in[0];
    u32* out = a.out;
    out[0] = (u32)__popc(v), out[1] = (u32)__ffs((int)v), out[2] = (u32)__clz((int)v);
    out[3] = __brev(v), out[4] = __float_as_uint(__fmul_rn(1.1f, 1.1f));
    out[5] = __float_as_uint(__fadd_rn(__fmul_rn(1.1f, 1.1f), -1.21f));
    out[6] = __float_as_uint(__fdiv_rn(1.0f, 3.0f));
    out[7] = (u32)max(min(3, -7), -9), out[8] = min(3u, 4u), out[9] = (u32)__clz(0);
    out[10] = (u32)__ffs(0), out[11] = __float_as_uint(fmaxf(-0.0f, 2.0f));
}

extern "C" __global__ void configured(Args a) { a.out[0] = (u32)(emu::config()[1] + emu::config()[0]); }

extern "C" __global__ void nothing() {}

// ---- mistakes ---------------------------------------------------------------------------------
extern "C" __global__ void divergent_barrier(Args a)
{
    if (threadIdx.x % 2) __syncthreads();
    if (threadIdx.x % 2 == 0) __syncwarp(0xffffffffu);
    a.out[0] = 1;
}

extern "C" __global__ void mixed_barriers(Args)
{
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncthreads_or(1);
}

extern "C" __global__ void foreign_mask(Args)
{
    if (threadIdx.x == 1) __syncwarp(1u);
}

extern "C" __global__ void crossed_masks(Args)
{
    __syncwarp(threadIdx.x < 8 ? 0xffffu : 0xffffffffu);
}

extern "C" __global__ void mixed_collectives(Args a)
{
    if (threadIdx.x % 2)
        __syncwarp();
    else
        a.out[0] = __ballot_sync(0xffffffffu, 1);
}

extern "C" __global__ void missing_lane(Args)
{
    if (threadIdx.x == 3) {
        for (u32 i = 0;; ++i) __syncwarp(1u << 3 | 1u << 4);  // lane 4 is in the full collective
    }
    __syncwarp();
}

static u32 deep(const Args& a, u32 n)
{
    volatile u32 frame[256];
    frame[n % 256] = a.in[0];
    return n ? deep(a, n - 1) + frame[n % 256] : 0;
}

extern "C" __global__ void deep_stack(Args a) { a.out[threadIdx.x] = deep(a, a.param); }
