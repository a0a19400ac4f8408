// CUDA's qualifiers, vector types and integer names, for host compilers.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef MOECOMM_EMULATOR_CHECKS
#define MOECOMM_EMULATOR_CHECKS 0
#endif

// With checks on, programs are compiled with the compiler's thread-sanitizer instrumentation, whose
// calls device_hooks.hpp receives. The emulator's own functions are not to be instrumented, and what
// kernels call (EMU_CALLED) stays a call: its return address is the place that reports name.
#if MOECOMM_EMULATOR_CHECKS
#define EMU_CALLED inline __attribute__((no_sanitize("thread"), noinline))
#define EMU_WITHIN inline __attribute__((no_sanitize("thread"), always_inline))
#else
#define EMU_CALLED inline
#define EMU_WITHIN inline
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// `__restrict__` is a keyword of g++ and clang++ already. `__shared__` stays undefined on purpose:
// a static would be shared by all blocks of all ranks; DYNAMIC_SHARED is per block.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
    unsigned int x, y;
};
struct uint3 {
    unsigned int x, y, z;
};
struct __align__(16) uint4 {
    unsigned int x, y, z, w;
};
struct int2 {
    int x, y;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int vx = 1, unsigned int vy = 1, unsigned int vz = 1)
        : x(vx), y(vy), z(vz)
    {
    }
};

inline uint2 make_uint2(unsigned int x, unsigned int y) { return uint2{x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w)
{
    return uint4{x, y, z, w};
}
inline int2 make_int2(int x, int y) { return int2{x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return int4{x, y, z, w}; }
inline float2 make_float2(float x, float y) { return float2{x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
