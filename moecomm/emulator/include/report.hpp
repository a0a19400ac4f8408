// Where stuck threads wait, as a text for people.
#pragma once

#include "world.hpp"

#include <map>
#include <string>

namespace emu {

// "polls record_flag+0x18 of rank 1, which is 4 (waits for 5)"
inline std::string describe_poll(World& w, const Fiber& f)
{
    const void* word = f.wait_address ? f.wait_address : f.polled;
    if (!word) return "waits in a loop that reads no flag";
    std::string text = "polls " + w.ranges.describe(word);
    if (reinterpret_cast<uintptr_t>(word) % 8 == 0)
        text += ", which is " +
                std::to_string(__atomic_load_n(static_cast<const u64*>(word), __ATOMIC_RELAXED));
    if (f.wait_address) text += " (waits for " + std::to_string(f.wait_expected) + ")";
    return text;
}

inline std::string describe_wait(World& w, const Fiber& f)
{
    const std::string place = describe_place(place_of(f.pc), f.pc);
    switch (f.state) {
        case State::at_barrier:
            return std::string("wait in ") + name_of(f.block->barrier.op) + place;
        case State::at_warp: {
            const Warp& warp = f.block->warps[f.index / kWarp];
            for (u32 g = 0; g < warp.num_groups; ++g)
                if (warp.groups[g].arrived >> f.lane & 1)
                    return std::string("wait in ") + name_of(warp.groups[g].op) + " with mask " +
                           hex(warp.groups[g].mask) + place;
            return "wait in a warp collective";
        }
        case State::polling: return describe_poll(w, f) + place;
        case State::fresh: return "have not begun";
        default: return "can run";
    }
}

// One line for threads of a block that wait alike.
inline std::string describe_waits(World& w, u32* first_rank)
{
    constexpr u32 kMostLines = 48;
    std::string text;
    u32 lines = 0;
    bool first = true;
    for (const auto& l : w.launches) {
        if (w.ranks[l->rank].dead) continue;
        if (first) *first_rank = l->rank;
        first = false;
        for (const auto& b : l->blocks) {
            std::map<std::string, std::pair<u32, u32>> waits;  // what → first thread, how many
            for (u32 i = 0; i < b->num_threads; ++i) {
                const Fiber& f = b->fibers[i];
                if (f.state == State::done) continue;
                auto at = waits.emplace(describe_wait(w, f), std::make_pair(i, 0u)).first;
                ++at->second.second;
            }
            for (const auto& entry : waits) {
                if (++lines > kMostLines) continue;
                text += "\n  " + describe_block(*b) + ": thread " +
                        std::to_string(entry.second.first);
                if (entry.second.second > 1)
                    text += " and " + std::to_string(entry.second.second - 1) + " more";
                text += " " + entry.first;
            }
        }
    }
    if (lines > kMostLines) text += "\n  ... and " + std::to_string(lines - kMostLines) + " more";
    return "after " + std::to_string(w.steps) + " steps" + text;
}

}  // namespace emu
