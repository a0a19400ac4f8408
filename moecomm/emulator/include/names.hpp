// Who a thread is, and what operations are called, in texts for people.
#pragma once

#include "block.hpp"

#include <dlfcn.h>

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

// Code addresses are kept as 32 bits: programs are loaded close to each other.
inline u32 place_of(const void* pc) { return static_cast<u32>(reinterpret_cast<uintptr_t>(pc)); }

// " at [/path/of/program.so+0x1234]", which the host turns into file and line. `near`: code of the
// same or another program.
inline std::string describe_place(u32 place, const void* near)
{
    if (!place || !near) return "";
    const u64 high = reinterpret_cast<uintptr_t>(near) >> 32;
    for (const u64 h : {high, high - 1, high + 1}) {
        const uintptr_t pc = static_cast<uintptr_t>(h << 32 | place) - 1;  // the call, not behind it
        Dl_info info;
        if (!dladdr(reinterpret_cast<void*>(pc), &info) || !info.dli_fname) continue;
        return std::string(" at [") + info.dli_fname + "+" +
               hex(pc - reinterpret_cast<uintptr_t>(info.dli_fbase)) + "]";
    }
    return "";
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
    return text + describe_place(place_of(f.pc), f.pc);
}

}  // namespace emu
