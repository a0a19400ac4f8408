// A codec's functions: written in Python, compiled by numba (moecomm/codecs).
//
// On a GPU they are LTO-IR, linked with the kernel and inlined; the emulator calls the machine code
// that numba made for this CPU. CODEC_SCALED: scales travel. CODEC_INVERSE: `encode` gets that in
// place of the scale. Their numbers are exact: the link does not fuse multiplications and additions.
#pragma once
#include "dtype.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#if CODEC_SIGNED
typedef i32 CodecBits;
#else
typedef u32 CodecBits;
#endif
extern "C" __device__ float moe_codec_scale(float amax);
extern "C" __device__ float moe_codec_inverse(float amax);
#if CODEC_SCALED
extern "C" __device__ u32 moe_codec_encode(float value, float factor);
extern "C" __device__ float moe_codec_decode(CodecBits bits, float scale);
#else
extern "C" __device__ u32 moe_codec_encode(float value);
extern "C" __device__ float moe_codec_decode(CodecBits bits);
#endif
// What is not called must not be named: nobody would link it.
#if CODEC_SCALED
DEVICE float call_scale(float amax) { return moe_codec_scale(amax); }
DEVICE u32 call_encode(float value, float factor) { return moe_codec_encode(value, factor); }
DEVICE float call_decode(i32 bits, float scale) { return moe_codec_decode(bits, scale); }
#else
DEVICE float call_scale(float) { return 1.0f; }
DEVICE u32 call_encode(float value, float) { return moe_codec_encode(value); }
DEVICE float call_decode(i32 bits, float) { return moe_codec_decode(bits); }
#endif
#if CODEC_INVERSE
DEVICE float call_inverse(float amax) { return moe_codec_inverse(amax); }
#else
DEVICE float call_inverse(float amax) { return call_scale(amax); }
#endif
#else
// One compile serves every codec of the same element size.
DEVICE float call_scale(float amax)
{
    return CODEC_SCALED ? reinterpret_cast<float (*)(float)>(CODEC_AT_scale)(amax) : 1.0f;
}

DEVICE float call_inverse(float amax)
{
    if (!CODEC_INVERSE) return call_scale(amax);
    return reinterpret_cast<float (*)(float)>(CODEC_AT_inverse)(amax);
}

DEVICE u32 call_encode(float value, float factor)
{
    if (!CODEC_SCALED) return reinterpret_cast<u32 (*)(float)>(CODEC_AT_encode)(value);
    return reinterpret_cast<u32 (*)(float, float)>(CODEC_AT_encode)(value, factor);
}

DEVICE float call_decode(i32 bits, float scale)
{
    if (!CODEC_SCALED) return reinterpret_cast<float (*)(i32)>(CODEC_AT_decode)(bits);
    return reinterpret_cast<float (*)(i32, float)>(CODEC_AT_decode)(bits, scale);
}
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
    s.scale = same_nan(call_scale(amax));
    s.factor = same_nan(call_inverse(amax));
    return s;
}

// `bits` as they travel: a signed codec gets them with their sign.
template <class Elem>
DEVICE float decode_bits(Elem bits, float scale)
{
    const u32 shift = 32 - 8 * sizeof(Elem);
    const i32 given = CODEC_SIGNED ? (i32)((u32)bits << shift) >> shift : (i32)bits;
    return same_nan(call_decode(given, scale));
}
