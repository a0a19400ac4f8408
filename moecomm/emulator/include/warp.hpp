// Results of warp collectives. Whoever arrives last computes what each lane gets.
#pragma once

#include "block.hpp"

namespace emu {

inline u32 reduce_pair(WarpOp op, u32 a, u32 b)
{
    switch (op) {
        case WarpOp::reduce_add: return a + b;
        case WarpOp::reduce_min: return a < b ? a : b;
        case WarpOp::reduce_max: return a > b ? a : b;
        case WarpOp::reduce_and: return a & b;
        case WarpOp::reduce_or: return a | b;
        default: return a ^ b;
    }
}

// What every lane of `lanes` gets from an operation whose result is the same for all.
inline u64 common_result(WarpOp op, const Fiber* warp, u32 lanes)
{
    u32 ballot = 0;
    const u32 first = static_cast<u32>(__builtin_ctz(lanes));
    u32 sum = static_cast<u32>(warp[first].warp_value);
    bool equal = true;
    for (u32 lane = first; lane < kWarp; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const u64 v = warp[lane].warp_value;
        if (v) ballot |= 1u << lane;
        if (lane != first) sum = reduce_pair(op, sum, static_cast<u32>(v));
        equal = equal && v == warp[first].warp_value;
    }
    switch (op) {
        case WarpOp::ballot: return ballot;
        case WarpOp::any: return ballot != 0;
        case WarpOp::all: return ballot == lanes;
        case WarpOp::match_all: return equal ? lanes : 0;
        default: return sum;
    }
}

inline u32 lanes_with(const Fiber* warp, u32 lanes, u64 value)
{
    u32 same = 0;
    for (u32 lane = 0; lane < kWarp; ++lane)
        if ((lanes >> lane & 1) && warp[lane].warp_value == value) same |= 1u << lane;
    return same;
}

// Sets warp_result of each lane of `lanes`; `warp` is the warp's first fiber. A shuffle from a lane
// that does not take part gives the poison pattern (CUDA: undefined).
inline void compute_results(WarpOp op, Fiber* warp, u32 lanes)
{
    if (op == WarpOp::sync) return;
    const bool shuffle = op >= WarpOp::shuffle && op <= WarpOp::shuffle_xor;
    const bool match = op == WarpOp::match_any;
    const u64 common = shuffle || match ? 0 : common_result(op, warp, lanes);
    for (u32 lane = 0; lane < kWarp; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Fiber& f = warp[lane];
        const u32 from = f.warp_source & 31u;
        if (shuffle)
            f.warp_result = lanes >> from & 1 ? warp[from].warp_value : 0xcbcbcbcbcbcbcbcbull;
        else
            f.warp_result = match ? lanes_with(warp, lanes, f.warp_value) : common;
    }
}

}  // namespace emu
