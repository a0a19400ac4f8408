// A codec's functions: written in Python, compiled by numba (moecomm/codecs).
//
// On a GPU they are LTO-IR, linked with the kernel and inlined; the emulator calls the machine code
// that numba made for this CPU. CODEC_SCALED: scales travel. CODEC_INVERSE: `encode` gets that in
// place of the scale. Their numbers are exact: the link does not fuse multiplications and additions.
#pragma once
#include "dtype.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#if CODEC_SCALED
extern "C" __device__ float moe_codec_scale(float amax);
extern "C" __device__ float moe_codec_inverse(float amax);
extern "C" __device__ u32 moe_codec_encode(float value, float factor);
#else
extern "C" __device__ u32 moe_codec_encode(float value);
#endif
#if CODEC_SCALED && CODEC_SIGNED
extern "C" __device__ float moe_codec_decode(i32 bits, float scale);
#elif CODEC_SCALED
extern "C" __device__ float moe_codec_decode(u32 bits, float scale);
#elif CODEC_SIGNED
extern "C" __device__ float moe_codec_decode(i32 bits);
#else
extern "C" __device__ float moe_codec_decode(u32 bits);
#endif
#define CODEC_CALL(name) moe_codec_##name
#else
#define CODEC_CALL(name) (reinterpret_cast<codec_##name>(CODEC_AT_##name))
typedef float (*codec_scale)(float amax);
typedef float (*codec_inverse)(float amax);
#if CODEC_SCALED
typedef u32 (*codec_encode)(float value, float factor);
typedef float (*codec_decode)(i32 bits, float scale);
#else
typedef u32 (*codec_encode)(float value);
typedef float (*codec_decode)(i32 bits);
#endif
#endif

#define ONE_NAN 0x7fc00000u

// Processors make NaN with different bits: where those travel or arrive there is one NaN.
DEVICE float same_nan(float value) { return value != value ? __uint_as_float(ONE_NAN) : value; }

struct CodecScale {
    float scale;   // what travels
    float factor;  // what encode gets
};

DEVICE CodecScale codec_scale_of(float amax)
{
    CodecScale s;
    s.scale = s.factor = 1.0f;
#if CODEC_SCALED
    s.scale = s.factor = same_nan(CODEC_CALL(scale)(amax));
#if CODEC_INVERSE
    s.factor = same_nan(CODEC_CALL(inverse)(amax));
#endif
#endif
    return s;
}

DEVICE u32 codec_encode_value(float value, float factor)
{
#if CODEC_SCALED
    return CODEC_CALL(encode)(value, factor);
#else
    return CODEC_CALL(encode)(value);
#endif
}

// `bits` as they travel: a signed codec gets them with their sign.
template <class Elem>
DEVICE float codec_decode_bits(Elem bits, float scale)
{
    const u32 shift = 32 - 8 * sizeof(Elem);
    const i32 given = CODEC_SIGNED ? (i32)((u32)bits << shift) >> shift : (i32)bits;
#if CODEC_SCALED
    return same_nan(CODEC_CALL(decode)(given, scale));
#else
    return same_nan(CODEC_CALL(decode)(given));
#endif
}
