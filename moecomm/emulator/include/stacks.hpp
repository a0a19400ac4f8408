// Stacks of fibers: carved from large lazily committed mappings, reused last in, first out.
//
// Each ends in a guard page as long as mappings are plentiful (Linux allows 65530 a process); the
// others have a canary word at their low end, looked at when a thread ends.
#pragma once

#include "abi.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <vector>

namespace emu {

class Stacks {
public:
    Stacks() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {}
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks()
    {
        for (const Mapping& m : mappings_) munmap(m.start, m.bytes);
    }

    char* take()
    {
        if (free_.empty()) grow();
        char* low = free_.back();
        free_.pop_back();
        return low;
    }

    void give_back(char* low) { free_.push_back(low); }

    bool intact(const char* low) const
    {
        const bool guarded = *reinterpret_cast<const u64*>(low + kStackBytes - 16) != 0;
        return guarded || *reinterpret_cast<const u64*>(low) == kCanary;
    }

    // Where a fresh thread begins. Stacks are a power of two apart, so their tops would share
    // cache sets: each starts some lines lower than the last.
    static char* top(char* low)
    {
        const uintptr_t number = reinterpret_cast<uintptr_t>(low) / kStackBytes;
        return low + kStackBytes - 64 - (number % 29) * 128;
    }

    static void set_thread(char* low, Thread* thread)
    {
        *reinterpret_cast<Thread**>(low + kStackBytes - sizeof(Thread*)) = thread;
    }

private:
    struct Mapping {
        void* start;
        size_t bytes;
    };
    static constexpr u64 kCanary = 0x5afe57ac5afe57acull;
    static constexpr size_t kPerMapping = 128;
    static constexpr size_t kMostGuarded = 12 * 1024;

    void grow()
    {
        const size_t bytes = (kPerMapping + 1) * kStackBytes;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
        flags |= MAP_NORESERVE;
#endif
        void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
        mappings_.push_back({start, bytes});
#if defined(MADV_NOHUGEPAGE)
        madvise(start, bytes, MADV_NOHUGEPAGE);  // a huge page would commit 16 stacks at once
#endif
        const uintptr_t first =
            (reinterpret_cast<uintptr_t>(start) + kStackBytes - 1) & ~(kStackBytes - 1);
        for (size_t i = kPerMapping; i-- > 0;) {
            char* low = reinterpret_cast<char*>(first + i * kStackBytes);
            const bool guarded = guarded_ < kMostGuarded && mprotect(low, page_, PROT_NONE) == 0;
            guarded_ += guarded;
            *reinterpret_cast<u64*>(low + kStackBytes - 16) = guarded;
            if (!guarded) *reinterpret_cast<u64*>(low) = kCanary;
            free_.push_back(low);
        }
    }

    size_t page_;
    size_t guarded_ = 0;
    std::vector<Mapping> mappings_;
    std::vector<char*> free_;
};

}  // namespace emu
