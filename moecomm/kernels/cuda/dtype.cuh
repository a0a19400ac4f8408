// Element types of rows: conversions between 16-byte chunks of a row and floats.
//
// INPUT_DTYPE, WIRE_DTYPE and COMBINE_DTYPE (DTYPE_*) are set per compile.
#pragma once
#include "common.cuh"

#define DTYPE_BF16 0
#define DTYPE_F16 1
#define DTYPE_F32 2
#define DTYPE_F8E4M3 3
#define DTYPE_BITS8 4  // what only a codec understands
#define DTYPE_BITS16 5

template <int D>
struct Bits;  // the unsigned integer that holds one element
template <>
struct Bits<DTYPE_BF16> {
    typedef u16 type;
};
template <>
struct Bits<DTYPE_F16> {
    typedef u16 type;
};
template <>
struct Bits<DTYPE_F32> {
    typedef u32 type;
};
template <>
struct Bits<DTYPE_F8E4M3> {
    typedef u8 type;
};
template <>
struct Bits<DTYPE_BITS8> {
    typedef u8 type;
};
template <>
struct Bits<DTYPE_BITS16> {
    typedef u16 type;
};

// 16 bytes of a row. Elements are cut out of words by shifts, not by a union or a pointer cast:
// NVRTC's optimiser takes differently typed views of one object for different objects.
struct Chunk {
    u32 words[4];
};

DEVICE Chunk to_chunk(uint4 v)
{
    Chunk c;
    c.words[0] = v.x;
    c.words[1] = v.y;
    c.words[2] = v.z;
    c.words[3] = v.w;
    return c;
}

DEVICE Chunk to_chunk(u64 low, u64 high)
{
    Chunk c;
    c.words[0] = (u32)low;
    c.words[1] = (u32)(low >> 32);
    c.words[2] = (u32)high;
    c.words[3] = (u32)(high >> 32);
    return c;
}

DEVICE uint4 to_v4(const Chunk& c)
{
    uint4 v;
    v.x = c.words[0];
    v.y = c.words[1];
    v.z = c.words[2];
    v.w = c.words[3];
    return v;
}

DEVICE Chunk zero_chunk()
{
    Chunk c;
    c.words[0] = c.words[1] = c.words[2] = c.words[3] = 0;
    return c;
}

// Element i (a constant once loops are unrolled) as an unsigned integer E.
template <class E>
DEVICE E get(const Chunk& c, u32 i)
{
    const u32 per_word = 4 / sizeof(E);
    return (E)(c.words[i / per_word] >> (8 * sizeof(E) * (i % per_word)));
}

// Element i of a chunk in which it is still zero.
template <class E>
DEVICE void set(Chunk& c, u32 i, E value)
{
    const u32 per_word = 4 / sizeof(E);
    c.words[i / per_word] |= (u32)value << (8 * sizeof(E) * (i % per_word));
}

// ---- half precision -----------------------------------------------------------------------
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
DEVICE float half_to_float(u16 h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 float_to_half(float f)
{
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#else
DEVICE float half_to_float(u16 h)
{
    const u32 sign = (u32)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // Scaled by 2^-112 the exponent field of a half reads as that of a float, subnormals too.
    const float scaled = __uint_as_float(rest << 13) * 0x1p112f;
    return __uint_as_float(sign | __float_as_uint(scaled));
}

DEVICE u16 float_to_half(float f)
{
    const u32 bits = __float_as_uint(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (u16)0x7fffu;
    if (rest >= 0x477ff000u) return (u16)(sign | 0x7c00u);
    if (rest < 0x38800000u)  // subnormal: adding 0.5 leaves steps of 2^-24, rounded to even
        return (u16)(sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u));
    return (u16)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13);
}
#endif

DEVICE float bfloat_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

DEVICE u16 float_to_bfloat(float f)
{
    const u32 bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40u);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// ---- fp8 e4m3 (no infinity): round to nearest even, saturate at 448 --------------------------
DEVICE u8 float_to_e4m3(float f)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    return (u8)pair;
#endif
    const u32 bits = __float_as_uint(f), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (u8)0x7fu;
    if (rest >= 0x43e00000u) return (u8)(sign | 0x7eu);
    if (rest < 0x3c800000u)  // below 2^-6: adding 2^14 leaves steps of 2^-9, rounded to even
        return (u8)(sign | (__float_as_uint(__uint_as_float(rest) + 16384.0f) - 0x46800000u));
    return (u8)(sign | (rest - 0x3c000000u + 0x7ffffu + (rest >> 20 & 1)) >> 20);
}

template <int D>
DEVICE float decode(typename Bits<D>::type bits)
{
    if constexpr (D == DTYPE_BF16) return bfloat_to_float(bits);
    if constexpr (D == DTYPE_F16) return half_to_float(bits);
    if constexpr (D == DTYPE_F32) return __uint_as_float(bits);
    return 0.0f;
}

template <int D>
DEVICE typename Bits<D>::type encode(float f)
{
    if constexpr (D == DTYPE_BF16) return float_to_bfloat(f);
    if constexpr (D == DTYPE_F16) return float_to_half(f);
    if constexpr (D == DTYPE_F32) return __float_as_uint(f);
    return float_to_e4m3(f);
}

// ---- chunks of rows in memory ---------------------------------------------------------------
template <int D>
struct Row {
    typedef typename Bits<D>::type Elem;
    static constexpr u32 kElems = 16 / sizeof(Elem);  // of one chunk

    // Chunk `c` of a row of HIDDEN elements; zeros past its end. `aligned`: rows start on
    // 16-byte boundaries. Else, and in the last partial chunk, elements go one at a time.
    static DEVICE Chunk load(const void* row, u64 c, bool aligned)
    {
        const u64 first = c * kElems;
        if (aligned && first + kElems <= HIDDEN) return to_chunk(ld_v4((const u8*)row + c * 16));
        Chunk chunk = zero_chunk();
        UNROLL for (u32 w = 0; w < 4; ++w)
            UNROLL_BY(1) for (u32 i = 0; i < kElems / 4; ++i) {  // not worth any code
                const u64 e = first + w * (kElems / 4) + i;
                if (e < HIDDEN)
                    chunk.words[w] |= (u32)ld((const Elem*)row + e) << (8 * sizeof(Elem) * i);
            }
        return chunk;
    }

    static DEVICE void store(void* row, u64 c, const Chunk& chunk, bool aligned)
    {
        const u64 first = c * kElems;
        if (aligned && first + kElems <= HIDDEN) {
            st_v4((u8*)row + c * 16, to_v4(chunk));
            return;
        }
        UNROLL for (u32 w = 0; w < 4; ++w)
            UNROLL_BY(1) for (u32 i = 0; i < kElems / 4; ++i) {
                const u64 e = first + w * (kElems / 4) + i;
                if (e < HIDDEN)
                    st((Elem*)row + e, (Elem)(chunk.words[w] >> (8 * sizeof(Elem) * i)));
            }
    }

    static DEVICE u64 num_chunks() { return (HIDDEN + kElems - 1) / kElems; }
};

// ---- sums in fp32 ---------------------------------------------------------------------------------
// The elements of one chunk, added up: a multiplication and an addition each round on their own, so
// that anybody can say bit for bit what comes out.
template <int D>
struct Sum {
    typedef Row<D> R;
    float values[R::kElems];

    static DEVICE Sum zero()
    {
        Sum s;
        for (u32 e = 0; e < R::kElems; ++e) s.values[e] = 0.0f;
        return s;
    }

    static DEVICE Sum of(const Chunk& c)
    {
        Sum s;
        for (u32 e = 0; e < R::kElems; ++e) s.values[e] = decode<D>(get<typename R::Elem>(c, e));
        return s;
    }

    DEVICE void add(float weight, const Chunk& c)
    {
        const Sum y = of(c);
        for (u32 e = 0; e < R::kElems; ++e)
            values[e] = __fadd_rn(values[e], __fmul_rn(weight, y.values[e]));
    }

    DEVICE Chunk rounded() const
    {
        Chunk c = zero_chunk();
        for (u32 e = 0; e < R::kElems; ++e) set<typename R::Elem>(c, e, encode<D>(values[e]));
        return c;
    }
};
