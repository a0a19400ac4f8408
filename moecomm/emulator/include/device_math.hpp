// CUDA's arithmetic and bit intrinsics. `_rn` forms need -ffp-contract=off to stay separate.
#pragma once

#include <math.h>
#include <string.h>

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned int __brev(unsigned int x)
{
    unsigned int r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
    return r;
}

inline unsigned int __float_as_uint(float f)
{
    unsigned int u;
    memcpy(&u, &f, sizeof u);
    return u;
}
inline float __uint_as_float(unsigned int u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
inline float __int_as_float(int i) { return __uint_as_float((unsigned int)i); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float a) { return (int)rintf(a); }

// CUDA's overloads: mixed signedness converts to unsigned, as in its own headers.
#define MOECOMM_EMU_MIN_MAX(R, A, B)                                   \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }       \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
MOECOMM_EMU_MIN_MAX(int, int, int)
MOECOMM_EMU_MIN_MAX(unsigned, unsigned, unsigned)
MOECOMM_EMU_MIN_MAX(unsigned, int, unsigned)
MOECOMM_EMU_MIN_MAX(unsigned, unsigned, int)
MOECOMM_EMU_MIN_MAX(long, long, long)
MOECOMM_EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
MOECOMM_EMU_MIN_MAX(unsigned long, long, unsigned long)
MOECOMM_EMU_MIN_MAX(unsigned long, unsigned long, long)
MOECOMM_EMU_MIN_MAX(long long, long long, long long)
MOECOMM_EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
MOECOMM_EMU_MIN_MAX(unsigned long long, long long, unsigned long long)
MOECOMM_EMU_MIN_MAX(unsigned long long, unsigned long long, long long)
#undef MOECOMM_EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
