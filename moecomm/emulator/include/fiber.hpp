// One CUDA thread as the runtime keeps it, and what it waits for.
#pragma once

#include "abi.hpp"
#include "clocks.hpp"
#include "context.hpp"
#include "faults.hpp"

namespace emu {

struct Block;
struct World;

enum class State : u8 { fresh, ready, polling, at_barrier, at_warp, done };

struct Fiber : Thread {
    Context context;
    char* stack = nullptr;  // taken when it first runs, given back when it ends
    Block* block = nullptr;
    World* world = nullptr;
    Fiber* next = nullptr;  // in a list of the scheduler
    u32 index = 0;          // linear thread index in the block
    State state = State::fresh;

    // Warp collective in hand.
    u32 warp_source = 0;
    u64 warp_value = 0;
    u64 warp_result = 0;

    // A poll finds nothing new if nothing was written since it began: see Scheduler.
    u64 poll_began = 0;
    u64 idle_count = 0;

    // What it says it waits for (reports only).
    const u64* wait_address = nullptr;
    u64 wait_expected = 0;

    u64 epoch = 0;        // of note_epoch
    ThreadClock clock;    // happens-before, with checks
    StoreBuffer delayed;  // data stores that a fault holds back
};

}  // namespace emu
