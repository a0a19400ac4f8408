// Who a thread is, and what operations are called, in texts for people.
#pragma once

#include "block.hpp"

#include <cstdio>
#include <string>

namespace emu {

inline std::string hex(u64 value)
{
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

inline const char* name_of(BarrierOp op)
{
    static const char* const names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and",
                                        "__syncthreads_count"};
    return names[static_cast<u32>(op)];
}

inline const char* name_of(WarpOp op)
{
    static const char* const names[] = {
        "__syncwarp",       "__shfl_sync",      "__shfl_up_sync",    "__shfl_down_sync",
        "__shfl_xor_sync",  "__ballot_sync",    "__any_sync",        "__all_sync",
        "__match_any_sync", "__match_all_sync", "__reduce_add_sync", "__reduce_min_sync",
        "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync"};
    return names[static_cast<u32>(op)];
}

inline std::string triple(u32 x, u32 y, u32 z)
{
    std::string text = std::to_string(x);
    if (y || z) text += "," + std::to_string(y);
    if (z) text += "," + std::to_string(z);
    return text;
}

inline std::string describe_block(const Block& b)
{
    const uint3 i = unflatten(b.number, b.launch->grid);
    return b.launch->name + " on rank " + std::to_string(b.launch->rank) + ", block " +
           triple(i.x, i.y, i.z);
}

inline std::string describe_thread(const Fiber& f)
{
    std::string text = describe_block(*f.block) + ", thread " +
                       triple(f.thread_idx.x, f.thread_idx.y, f.thread_idx.z);
    if (f.epoch) text += ", epoch " + std::to_string(f.epoch);
    return text;
}

}  // namespace emu
