// Time as device code sees it: the machine's, or a simulation's own.
#pragma once

#include "abi.hpp"

#include <sched.h>
#include <time.h>

namespace emu {

inline u64 machine_time_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<u64>(t.tv_sec) * 1000000000u + static_cast<u64>(t.tv_nsec);
}

// Lets other processes of this machine run, since only they can end our waits: first by giving up
// the processor, then by sleeping. `idle_turns`: how often in a row nothing was found.
inline void nap(u64 idle_turns)
{
    if (idle_turns < 64) {
        sched_yield();
        return;
    }
    const timespec pause = {0, idle_turns < 1024 ? 20000 : 50000};
    nanosleep(&pause, nullptr);
}

// A simulation's clock: every step takes a little; when all threads do nothing but wait, it jumps,
// each time a quarter further: a timeout of 30 s costs some eighty looks at the flags, and of two
// waits the one that began earlier by a third of the timeout still ends first.
class VirtualClock {
public:
    u64 now() const { return now_; }
    void step() { now_ += kStepNs; }
    void spend(u64 ns) { now_ += ns; }
    void progressed() { jump_ = kFirstJump; idle_ns_ = 0; }
    // How long nothing but time has passed.
    u64 idle_ns() const { return idle_ns_; }

    // Jumps, not past `limit` (0: none).
    void jump(u64 limit)
    {
        u64 by = jump_;
        if (limit && now_ + by > limit) by = limit > now_ ? limit - now_ : 0;
        now_ += by;
        idle_ns_ += by;
        if (jump_ < kLastJump) jump_ += jump_ / 4;
    }
    void move_to(u64 ns)
    {
        if (ns > now_) now_ = ns;
    }

private:
    static constexpr u64 kStepNs = 20;
    static constexpr u64 kFirstJump = 1000;
    static constexpr u64 kLastJump = 8000000000u;
    u64 now_ = 1000000000;  // not 0, which kernels may use for "none"
    u64 jump_ = kFirstJump;
    u64 idle_ns_ = 0;
};

}  // namespace emu
