// Calls one function of a codec on many arguments, to compare the answers with plain Python's.
//
// Floats go in and out by their bits; `second` is used where the function takes two arguments.
#include "codec.cuh"

#define CHECK_SCALE 0u
#define CHECK_INVERSE 1u
#define CHECK_ENCODE 2u

// Mirrored by moecomm/kernels/codec_check.py.
struct CheckArgs {
    u64 first;   // u32 [count]
    u64 second;
    u64 results;
    u64 count;
    u64 function;
};

DEVICE u32 checked_call(u64 function, u32 first, u32 second)
{
    const float x = __uint_as_float(first), y = __uint_as_float(second);
    if (function == CHECK_SCALE) return __float_as_uint(codec_scale_of(x).scale);
    if (function == CHECK_INVERSE) return __float_as_uint(codec_scale_of(x).factor);
    if (function == CHECK_ENCODE) return call_encode(x, y);
    return __float_as_uint(decode_bits((Bits<WIRE_DTYPE>::type)first, y));
}

extern "C" __global__ void codec_check(CheckArgs a)
{
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) {
        const u32 first = ld(reinterpret_cast<const u32*>(a.first) + i);
        const u32 second = ld(reinterpret_cast<const u32*>(a.second) + i);
        st(reinterpret_cast<u32*>(a.results) + i, checked_call(a.function, first, second));
    }
}
