// Named memory: what reports call an address, and which rules the checks apply to it.
#pragma once

#include "abi.hpp"

#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

namespace emu {

enum class RangeKind : u32 {
    symmetric = 0,  // slots that peers write, reused by every epoch
    local = 1,      // this rank's own, unwritten at first
    input = 2,      // written (or zeroed) by the host
};

struct Range {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    uintptr_t origin = 0;  // where it began when it was registered
    u32 rank = 0;
    RangeKind kind = RangeKind::input;
    std::string name;

    bool holds(uintptr_t a) const { return a >= begin && a < end; }
};

// Ranges that do not overlap: a new one takes its bytes from those that held them.
class Ranges {
public:
    void add(const Range& r)
    {
        remove(r.begin, r.end);
        if (r.end > r.begin) by_begin_[r.begin] = r;
    }

    void remove(uintptr_t begin, uintptr_t end)
    {
        recent_.fill(nullptr);
        auto it = by_begin_.upper_bound(begin);
        if (it != by_begin_.begin()) --it;
        while (it != by_begin_.end() && it->second.begin < end) {
            const Range old = it->second;
            if (old.end <= begin) {
                ++it;
                continue;
            }
            it = by_begin_.erase(it);
            if (old.begin < begin) keep(old, old.begin, begin);
            if (old.end > end) keep(old, end, old.end);
        }
    }

    const Range* find(uintptr_t address)
    {
        const Range*& recent = recent_[address / 128 % recent_.size()];
        if (recent && recent->holds(address)) return recent;
        auto it = by_begin_.upper_bound(address);
        if (it == by_begin_.begin()) return nullptr;
        --it;
        if (!it->second.holds(address)) return nullptr;
        return recent = &it->second;
    }

    // "combine_row+0x40 of rank 2", or the bare address.
    std::string describe(const void* p)
    {
        const uintptr_t address = reinterpret_cast<uintptr_t>(p);
        char text[64];
        const Range* r = find(address);
        if (!r) {
            std::snprintf(text, sizeof text, "unregistered %p", p);
            return text;
        }
        std::snprintf(text, sizeof text, "+0x%llx of rank %u",
                      static_cast<unsigned long long>(address - r->origin), r->rank);
        return r->name + text;
    }

private:
    void keep(const Range& old, uintptr_t begin, uintptr_t end)
    {
        Range part = old;
        part.begin = begin;
        part.end = end;
        by_begin_[begin] = part;
    }

    std::map<uintptr_t, Range> by_begin_;
    std::array<const Range*, 64> recent_ = {};
};

}  // namespace emu
